"""Prints median times of commands that take turns: ``times.py JSON REPEATS``.

JSON is an object: name -> argv. An argv with the word ``{host}`` is started for all
hosts of the Grid Engine job at once. Prints an object: name -> seconds.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path


def hosts() -> list[str]:
    listed = os.environ.get("PE_HOSTFILE")
    if listed is None:
        return []
    return [line.split()[0] for line in Path(listed).read_text().splitlines()]


def seconds(argv: list[str]) -> float:
    begin = time.perf_counter()
    for_all = [[w.replace("{host}", host) for w in argv] for host in hosts()]
    started = [
        subprocess.Popen(
            each,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for each in (for_all if "{host}" in argv else [argv])
    ]
    for process in started:
        _, said = process.communicate()
        if process.returncode:
            sys.exit(f"{process.args!r} failed: {said.decode()[-2000:]}")
    return time.perf_counter() - begin


commands: dict[str, list[str]] = json.loads(sys.argv[1])
found: dict[str, list[float]] = {name: [] for name in commands}
for _ in range(int(sys.argv[2])):
    for name, words in commands.items():
        found[name].append(seconds(words))
print("TIMES", json.dumps({n: statistics.median(times) for n, times in found.items()}))
