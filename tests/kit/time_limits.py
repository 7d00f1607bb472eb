"""Scales time limits in tests by how slow this machine currently is.

A limit in a test ("reported within a second") assumes a machine of usual speed. If this
is a virtual machine on a busy host, it may get a third of that speed, and a test that
fails for this reason shows no fault of the product. So limits grow with the time that a
small fixed piece of work takes here; on a fast machine they stay as written.
"""

from __future__ import annotations

import statistics
import time

# The time of 300,000 rounds of the loop below on a CPU core of 2020.
_USUAL_S = 0.025


def _work_s() -> float:
    began_s = time.perf_counter()
    total = 0
    for number in range(300_000):
        total += number * number % 7
    return time.perf_counter() - began_s


_slowness = [1.0]


def allow_s(limit_s: float) -> float:
    """The limit, multiplied by the slowness of this machine compared with a usual one.

    Uses the highest slowness measured so far: the machine may be fast again by now.
    """
    now = statistics.median(_work_s() for _ in range(3)) / _USUAL_S
    _slowness[0] = max(_slowness[0], now)
    return limit_s * _slowness[0]


allow_s(0)
