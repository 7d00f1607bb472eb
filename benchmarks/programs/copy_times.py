"""Measures how fast N processes at once can copy memory; prints seconds for each size.

``argv``: a JSON list of sizes in bytes, and N.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from multiprocessing.synchronize import Barrier

import numpy as np

REPEATS = 9


def copies(sizes: list[int], together: Barrier, chief: bool) -> None:
    found = {}
    for size in sizes:
        source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
        times = []
        for _ in range(REPEATS):
            together.wait()
            begin = time.perf_counter()
            target[:] = source
            together.wait()
            times.append(time.perf_counter() - begin)
        found[size] = statistics.median(times)
    if chief:
        print("TIMES", json.dumps(found), flush=True)


if __name__ == "__main__":
    wanted, count = json.loads(sys.argv[1]), int(sys.argv[2])
    barrier = multiprocessing.Barrier(count)
    others = [
        multiprocessing.Process(target=copies, args=(wanted, barrier, False))
        for _ in range(count - 1)
    ]
    for other in others:
        other.start()
    copies(wanted, barrier, True)
    for other in others:
        other.join()
