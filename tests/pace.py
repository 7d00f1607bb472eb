"""How slow this machine is just now: limits in seconds are for a usual one.

What a test says of time ("told within a second") is true of a machine that has the
time. A host of many virtual machines may give this one a third of it, and a test that
fails for that says nothing of the product. So limits grow with the time that a small
fixed piece of work takes here and now, and are as they stand where it is quick.
"""

from __future__ import annotations

import statistics
import time

# 300,000 rounds of the loop below took about this long on a core of 2020.
_USUAL_S = 0.025


def _work_s() -> float:
    began_s = time.perf_counter()
    total = 0
    for number in range(300_000):
        total += number * number % 7
    return time.perf_counter() - began_s


_slowness = [1.0]


def allow_s(limit_s: float) -> float:
    """The limit, longer by as much as this machine is slower than a usual one.

    At its slowest so far: it may be quick again when we look.
    """
    now = statistics.median(_work_s() for _ in range(3)) / _USUAL_S
    _slowness[0] = max(_slowness[0], now)
    return limit_s * _slowness[0]


allow_s(0)
