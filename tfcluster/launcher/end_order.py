"""When tasks ended, in the order in which their hosts saw it."""

from __future__ import annotations

import math
from collections import deque

_REMEMBERED = 256
_STEP_S = 1e-6
"""Between ends of which only the order is known."""


class EndOrder:
    """Of all hosts. An agent numbers the ends that it sees from 0."""

    def __init__(self) -> None:
        self._known: dict[str, deque[tuple[int, float]]] = {}

    def at_s(self, host: str, number: int, about_s: float) -> float:
        """The time of an end that was about then.

        News take their time, and more or less of it: so the number decides between
        two ends on one host.
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
