"""When replicas that train by themselves are averaged, and how far they drift. Pure.

Nothing here asks a clock or another rank: what they say is handed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

DEFAULT_STEPS = 100
"""Between averagings, where neither steps nor seconds are given."""

_GROWTH = 10
"""The first steps trace and compile: their pace says little about those to come."""
_FAR = 0.1
"""Replicas this close to their mean (relative) are no matter, however that grows."""
_GROWN = 4.0
"""So many times as far as in the beginning, and they drift."""
_BEGINNING = 5
"""Averagings: weights move quickly then, and show what is usual."""


@dataclass
class Schedule:
    """After how many steps of a rank the next averaging comes.

    All ranks have the same number: the chief's ``proposal``, told at every averaging.
    """

    every: int | None = None
    seconds: float | None = None
    """Instead of steps."""
    interval: int = field(init=False)
    """Steps from one averaging to the next."""

    def __post_init__(self) -> None:
        if self.seconds is None:
            self.interval = self.every or DEFAULT_STEPS
        else:
            # The pace is unknown: one step measures it.
            self.interval = 1

    def is_due(self, steps: int) -> bool:
        """Whether ``steps`` since the last averaging are enough."""
        return steps >= self.interval

    def proposal(self, steps: int, elapsed_s: float) -> int:
        """The next interval, where the last ``steps`` took ``elapsed_s``."""
        if self.seconds is None or steps < 1:
            return self.interval
        pace = self.seconds * steps / max(elapsed_s, 1e-9)
        return int(min(max(1.0, pace), self.interval * _GROWTH))

    def agreed(self, interval: int) -> None:
        """All ranks have been told the chief's proposal."""
        self.interval = max(1, interval)


@dataclass
class Drift:
    """How far replicas are from their mean, averaging by averaging."""

    usual: float = 0.0
    """The farthest that they were in the beginning."""
    seen: int = 0
    warned: bool = False

    def saw(self, distance: float, steps: int) -> str | None:
        """A warning, once, when replicas move away from each other.

        ``distance``: of the parameters from their mean, relative to its length, before
        an averaging after ``steps`` steps.
        """
        self.seen += 1
        if self.warned:
            return None
        if not math.isfinite(distance):
            self.warned = True
            return (
                "the parameters of a replica are no longer finite, and their average "
                "is not finite either: try a lower learning rate"
            )
        if self.seen <= _BEGINNING:
            self.usual = max(self.usual, distance)
            return None
        if distance < max(_FAR, _GROWN * self.usual):
            return None
        self.warned = True
        return (
            f"the replicas drift: after {steps} steps their parameters were "
            f"{distance:.1%} away from their average, compared with at most "
            f"{self.usual:.1%} in the beginning. Average more often "
            "(runtime.sync_every), or train with a lower learning rate"
        )
