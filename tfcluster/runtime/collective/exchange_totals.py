"""Adds up the exchanges of a rank by their purpose: how many, bytes, seconds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_KINDS = 64
_OTHERS = "others"


@dataclass(slots=True)
class Total:
    """What the exchanges with one purpose have cost so far."""

    count: int = 0
    seconds: float = 0.0
    """Including the time in which this rank waited for others."""
    bytes: int = 0
    """What this rank has contributed."""


class ExchangeTotals:
    """The totals of one rank, by what the exchanges were for.

    One thread adds at a time; another may read.
    """

    def __init__(self) -> None:
        self._totals: dict[str, Total] = {}

    def add(self, what: str, seconds: float, nbytes: int) -> None:
        """Count an exchange. Further purposes than the first 64 count as "others"."""
        total = self._totals.get(what)
        if total is None:
            if len(self._totals) >= _MOST_KINDS:
                what = _OTHERS
            total = self._totals.setdefault(what, Total())
        total.count += 1
        total.seconds += seconds
        total.bytes += nbytes

    def longest(self, most: int) -> list[tuple[str, Total]]:
        """The purposes that have taken most time, at most this many of them."""
        # A copy: another thread may add a purpose meanwhile.
        found = list(self._totals.copy().items())
        found.sort(key=lambda pair: pair[1].seconds, reverse=True)
        return found[:most]
