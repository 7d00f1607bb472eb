"""Adds up a rank's exchanges by purpose: their number, bytes and seconds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

_MOST_KINDS = 64
_OTHERS = "others"


@dataclass(slots=True)
class Total:
    """The cost so far of the exchanges with one purpose."""

    count: int = 0
    seconds: float = 0.0
    """Including the time in which this rank waited for others."""
    bytes: int = 0
    """The bytes that this rank has contributed."""


class ExchangeTotals:
    """The totals of one rank, by the purpose of the exchanges.

    One thread adds at a time; another may read.
    """

    def __init__(self) -> None:
        self._totals: dict[str, Total] = {}

    def add(self, what: str, seconds: float, nbytes: int) -> None:
        """Count an exchange. Purposes after the first 64 count as "others"."""
        total = self._totals.get(what)
        if total is None:
            if len(self._totals) >= _MOST_KINDS:
                what = _OTHERS
            total = self._totals.setdefault(what, Total())
        total.count += 1
        total.seconds += seconds
        total.bytes += nbytes

    def longest(self, most: int) -> list[tuple[str, Total]]:
        """The purposes that have taken the most time, at most this many."""
        # Copy the totals: another thread may add a purpose meanwhile.
        found = list(self._totals.copy().items())
        found.sort(key=lambda pair: pair[1].seconds, reverse=True)
        return found[:most]
