"""Where a rank is among the exchanges of its group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class ExchangePhase(NamedTuple):
    """This rank's current or last exchange.

    Other threads read it, so it is immutable and replaced as a whole.
    """

    number: int
    what: str
    since: float
    inside: bool

    @property
    def exchange(self) -> str:
        return f"exchange {self.number}: {self.what}"

    def ended(self, at_s: float) -> ExchangePhase:
        return ExchangePhase(self.number, self.what, at_s, inside=False)


class GraphProgress(NamedTuple):
    """The progress of a graph that contains collective operations."""

    ended: int
    """The number of exchanges that the graph has completed."""
    waiting: bool
    """Whether the graph is in a collective operation now."""
    since: float
    """The time when this was last seen to change, by the group's clock."""


@dataclass(frozen=True, slots=True)
class RunningGraph:
    """A running graph with exchanges; none of our Python code runs in it."""

    what: str
    progress: Callable[[], GraphProgress]
    since: float

    def phase(self, before: ExchangePhase) -> ExchangePhase:
        """The rank's current or last exchange; ``before`` is that outside of graphs."""
        ended, waiting, since = self.progress()
        number = before.number + ended
        if before.inside:
            return ExchangePhase(number, before.what, before.since, inside=True)
        if waiting:
            return ExchangePhase(number + 1, self.what, since, inside=True)
        if ended:
            return ExchangePhase(number, self.what, since, inside=False)
        return before
