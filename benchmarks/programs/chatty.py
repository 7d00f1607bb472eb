"""Prints 10,000 lines a second while it works for some seconds; writes its run time."""

import os
import sys
import time
from pathlib import Path

LINES = 60_000


def work(rounds: int) -> int:
    total = 0
    for i in range(rounds):
        total += i * i
    return total


begin = time.perf_counter()
work(200_000)
rounds = int(200_000 * 100e-6 / (time.perf_counter() - begin))  # 0.1 ms a line
if given := os.environ.get("BENCH_ROUNDS"):
    rounds = int(given)
begin = time.perf_counter()
for number in range(LINES):
    work(rounds)
    sys.stdout.write(f"step {number} loss 0.12345 accuracy 0.98765 something more\n")
    if number % 100 == 0:
        sys.stdout.flush()
elapsed = time.perf_counter() - begin
with Path(os.environ["BENCH_MARKS"]).open("a") as file:
    file.write(f"{rounds} {elapsed}\n")
