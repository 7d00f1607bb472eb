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
