"""Times all-reduces of float32 and prints times as JSON; shared by several programs.

``argv[1]`` is a JSON list of sizes in bytes. Rank 0 prints the median of each.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

_LARGE_BYTES = 1 << 27
"""Bytes to reduce for each size, within the limits of ``repeats``."""


def repeats(size: int) -> int:
    return max(7, min(300, _LARGE_BYTES // size))


def report(
    rank: int,
    act: Callable[[int], Callable[[], None]],
    meet: Callable[[], object],
) -> None:
    """Time all-reduces; rank 0 prints the medians.

    ``act(count)`` prepares an all-reduce of ``count`` numbers. ``meet`` is a barrier:
    all ranks begin each all-reduce together, as ranks of equal speed do in training.
    """
    found = {}
    for size in json.loads(sys.argv[1]):
        reduce = act(size // 4)
        times = []
        for number in range(repeats(size) + 3):
            meet()
            begin = time.perf_counter()
            reduce()
            if number >= 3:
                times.append(time.perf_counter() - begin)
        found[size] = statistics.median(times)
    if rank == 0:
        print("TIMES", json.dumps(found), flush=True)
