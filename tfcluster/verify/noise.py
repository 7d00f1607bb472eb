"""What one process differs from itself by, in each value and after each step. Pure.

The noise is measured: the program runs alone twice, the second time with another number
of threads and with gradients that are moved by about their rounding errors. Training
amplifies this, in some values to their whole size, as in a bias before a normalisation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable
from dataclasses import dataclass, field

MARGIN = 8.0
"""How many times the measured difference counts as noise.

Two runs are only one sample, and ranks round at other places.
"""


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise by value; below ``floor`` nothing counts as a difference."""

    floor: float
    measured: dict[Hashable, list[tuple[int, float]]] = field(default_factory=dict)
    """By value, the steps after which its largest difference so far has grown."""

    def add(self, value: Hashable, step: int, difference: float) -> None:
        """Note a difference of the two runs; steps come in order."""
        grown = self.measured.setdefault(value, [])
        if difference > (grown[-1][1] if grown else 0.0):
            grown.append((step, difference))

    def of(self, value: Hashable, step: int) -> float:
        """The largest difference of ``value`` that counts as equal after ``step``."""
        grown = self.measured.get(value, [])
        place = bisect_right(grown, step, key=lambda each: each[0])
        return max(self.floor, MARGIN * grown[place - 1][1] if place else 0.0)
