"""Times of tasks' ends that agree with the order in which their hosts saw them."""

from __future__ import annotations

import math
from collections import deque

_REMEMBERED = 256
_STEP_S = 1e-6
"""The distance between two ends if only their order is known."""


class EndOrder:
    """The ends on all hosts. Each agent numbers the ends that it sees, from 0."""

    def __init__(self) -> None:
        self._known: dict[str, deque[tuple[int, float]]] = {}

    def at_s(self, host: str, number: int, about_s: float) -> float:
        """The time of an end that happened at about ``about_s``.

        Reports are delayed by varying amounts, so the numbers decide the order of two
        ends on one host, and the times are adjusted to it.
        """
        known = self._known.setdefault(host, deque(maxlen=_REMEMBERED))
        before = max((s for n, s in known if n < number), default=-math.inf)
        after = min((s for n, s in known if n > number), default=math.inf)
        if not before < about_s < after:
            low = before if math.isfinite(before) else after - 2 * _STEP_S
            high = after if math.isfinite(after) else before + 2 * _STEP_S
            about_s = (low + high) / 2
        known.append((number, about_s))
        return about_s
