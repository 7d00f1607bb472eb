"""Decides when local SGD averages replicas, and how far they drift apart. Pure.

Clock readings and other ranks' values are passed in as arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

DEFAULT_STEPS = 100
"""Steps between averagings if neither steps nor seconds are configured."""

_GROWTH = 10
"""Limits an interval's growth: the first steps include tracing and compilation."""
_FAR = 0.1
"""Relative distance from the mean below which replicas do not count as drifting."""
_GROWN = 4.0
"""Replicas drift if their distance is this many times as large as at the beginning."""
_BEGINNING = 5
"""The first averagings, which define the usual distance: weights move fastest then."""


@dataclass
class Schedule:
    """Decides after how many of a rank's steps the next averaging is due.

    All ranks use the chief's ``proposal``, which is exchanged at every averaging.
    """

    every: int | None = None
    seconds: float | None = None
    """Seconds between averagings; replaces ``every``."""
    interval: int = field(init=False)
    """Steps from one averaging to the next."""

    def __post_init__(self) -> None:
        if self.seconds is None:
            self.interval = self.every or DEFAULT_STEPS
        else:
            # The step rate is unknown: one step measures it.
            self.interval = 1

    def is_due(self, steps: int) -> bool:
        """Whether ``steps`` since the last averaging are enough."""
        return steps >= self.interval

    def proposal(self, steps: int, elapsed_s: float) -> int:
        """The next interval in steps, if the last ``steps`` took ``elapsed_s``."""
        if self.seconds is None or steps < 1:
            return self.interval
        steps_per_interval = self.seconds * steps / max(elapsed_s, 1e-9)
        return int(min(max(1.0, steps_per_interval), self.interval * _GROWTH))

    def agreed(self, interval: int) -> None:
        """Adopt the chief's proposal, as all ranks do."""
        self.interval = max(1, interval)


@dataclass
class Drift:
    """The distance of replicas from their mean over time."""

    usual: float = 0.0
    """The largest distance at the beginning."""
    seen: int = 0
    warned: bool = False

    def saw(self, distance: float, steps: int) -> str | None:
        """Return a warning, once, if the replicas move away from each other.

        ``distance`` is the distance of the parameters from their mean, relative to the
        norm of the mean. It was measured before an averaging after ``steps`` steps.
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
