"""Times all-reduces of float32 and prints them as JSON: what the programs share.

``argv[1]`` is a JSON list of sizes in bytes. Rank 0 prints the median of each.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

_LARGE_BYTES = 1 << 27
"""So much is reduced for each size, as far as that is not too often."""


def repeats(size: int) -> int:
    return max(7, min(300, _LARGE_BYTES // size))


def report(
    rank: int,
    act: Callable[[int], Callable[[], None]],
    meet: Callable[[], object],
) -> None:
    """``act(count)`` prepares an all-reduce of so many numbers; ``meet`` is a barrier.

    Every all-reduce begins when all ranks are there, as gradients of equal ranks do.
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
