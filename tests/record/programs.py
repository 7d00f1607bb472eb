"""Small programs that tests run in separate processes: writers, holders, rivals."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tfcluster.base.isolated_import import PACKAGE_ROOT

BEGIN_RUN = """
import sys, time
from dataclasses import asdict
from pathlib import Path
from tfcluster.record.files import replace_json
from tfcluster.record.liveness import acquire, identity
from tfcluster.record.paths import RunPaths
from tfcluster.record.events import Writer
paths = RunPaths(Path(sys.argv[1]))
lock = acquire(paths)
writer = Writer(paths)
writer.append({"type": "run", "run": paths.run, **asdict(identity())})
assert writer.flush(10)
print("begun", flush=True)
"""

WAIT = "sys.stdin.read()\n"

WRITE_WITHOUT_END = """
number = 0
while True:
    number += 1
    tasks = {f"worker:{i}": {"step": number} for i in range(50)}
    writer.append({"type": "note", "text": "x" * (number % 500), "number": number})
    writer.progress(tasks)
    replace_json(paths.plan, {"number": number, "tasks": [tasks] * 5}, durable=False)
    if number % 7 == 0:
        writer.flush(10)
"""

MANY_SHORT_RUNS = """
import sys, time
from dataclasses import asdict
from pathlib import Path
from tfcluster.record.liveness import acquire, identity
from tfcluster.record.paths import create_run
from tfcluster.record.events import Writer
for number in range(int(sys.argv[2])):
    paths = create_run(Path(sys.argv[1]), "digits", 1795169700.0 + number)
    lock = acquire(paths)
    writer = Writer(paths)
    writer.append({"type": "run", "run": paths.run, **asdict(identity())})
    assert writer.flush(10)
    print(paths.root, flush=True)
    writer.append({"type": "end", "state": "succeeded", "exit_code": 0})
    assert writer.close(10)
    lock.release()
"""

RIVAL = """
import sys
from pathlib import Path
from tfcluster.base.errors import ActiveRunError
from tfcluster.record.run_locks import hold_name
print("ready", flush=True)
sys.stdin.readline()
try:
    hold = hold_name(Path(sys.argv[1]), "digits", sys.argv[2], now_s=1795169700.0)
    print("won", flush=True)
except ActiveRunError as error:
    print(f"lost: {error}", flush=True)
sys.stdin.read()
"""


@contextmanager
def program(code: str, *args: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Run ``code`` until the end of the block, with pipes to it."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=PACKAGE_ROOT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()
