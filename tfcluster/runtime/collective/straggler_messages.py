"""How far each rank is, and what to say of those that others wait for. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a rank is, in its own words."""

    number: int
    """Of the exchange that it is in, else of the last one that it did; from 1."""
    what: str
    """What that exchange is about; empty before the first one."""
    since_s: float
    """How long it has been in there, or out of it."""
    inside: bool

    def as_frame(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "what": self.what,
            "since_s": round(self.since_s, 3),
            "inside": self.inside,
        }

    @classmethod
    def of_frame(cls, frame: Mapping[str, Any]) -> Standing:
        """Raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            number=int(frame["number"]),
            what=str(frame["what"]),
            since_s=float(frame["since_s"]),
            inside=bool(frame["inside"]),
        )

    @property
    def exchange(self) -> str:
        return f"exchange {self.number}: {self.what}"

    def has_come_to(self, number: int) -> bool:
        """It is in that exchange, or was."""
        return self.number >= number


def missing(number: int, others: Mapping[int, Standing | None]) -> list[int]:
    """The ranks that have not come to an exchange; None: one that does not answer."""
    return [
        rank
        for rank, standing in sorted(others.items())
        if standing is None or not standing.has_come_to(number)
    ]


def speaks(rank: int, number: int, others: Mapping[int, Standing | None]) -> bool:
    """Whether it is for this rank to say who is missing: one is enough."""
    absent = missing(number, others)
    return rank < min(set(others) - set(absent), default=rank + 1)


def stalled_text(mine: Standing, others: Mapping[int, Standing | None]) -> str:
    """Who keeps a rank waiting that is in an exchange, and what those last did."""
    absent = missing(mine.number, others)
    if not absent:
        return f"{mine.exchange} has taken {mine.since_s:.0f} s; all ranks are in it"
    first, *rest = (_absent_text(rank, others[rank]) for rank in absent)
    late = f"rank {absent[0]} has not come for {mine.since_s:.0f} s to {mine.exchange}"
    return "; ".join([f"{late}; {first}", *map(_named, absent[1:], rest)])


def _named(rank: int, text: str) -> str:
    return f"nor has rank {rank}; {text}"


def _absent_text(rank: int, standing: Standing | None) -> str:
    if standing is None:
        return "it does not answer (stopped, or stuck outside Python?)"
    if standing.inside:
        return f"it has been in {standing.exchange} for {standing.since_s:.0f} s"
    if not standing.number:
        return "it has not exchanged anything yet"
    return f"it last did {standing.exchange}, {standing.since_s:.0f} s ago"


def unconnected_text(ranks: Sequence[int], waited_s: float) -> str:
    """Of ranks that have not come to the first exchange, nor even near it."""
    who = ", ".join(map(str, ranks))
    return f"rank {who} has not connected for {waited_s:.0f} s"


def awaited_text(rank: int, waited_s: float, exchange: str) -> str:
    """What a missing rank writes above its stacks."""
    return (
        f"rank {rank} has waited {waited_s:.0f} s for this rank to come to {exchange}"
    )
