"""Finds why ranks have left, and which of them caused a failure. Pure.

A rank that fails sends the reason before it disconnects, and so does a program that
ends; a process that is killed sends nothing. So the other ranks can name the rank that
caused the failure, instead of the rank whose connection happened to break first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tfcluster.runtime.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
)

_KINDS: dict[str, type[CollectiveError]] = {
    kind.__name__: kind
    for kind in (
        CollectiveError,
        CollectiveMismatchError,
        CollectiveTimeoutError,
        PeerLostError,
    )
}
_MAX_TEXT = 4000


@dataclass(frozen=True, slots=True)
class ExitReport:
    """The report that a rank sends when it leaves."""

    number: int
    """The number of the last exchange that it completed or in which it failed."""
    kind: str = ""
    """The error's class; empty for a program that has just ended."""
    text: str = ""
    """The error's message, or the reason why the program has ended."""
    steps: int = 0
    """Training steps that it has done."""
    state: Mapping[str, str] = field(default_factory=dict)
    """The state that should be equal on all ranks that end after the same exchange."""

    def as_frame(self) -> dict[str, Any]:
        return {**asdict(self), "text": self.text[:_MAX_TEXT]}

    @classmethod
    def of_frame(cls, frame: Mapping[str, Any]) -> ExitReport:
        """The inverse of ``as_frame``.

        Raises KeyError, TypeError or ValueError for a malformed frame.
        """
        state = {str(k): str(v) for k, v in dict(frame["state"]).items()}
        return cls(
            number=int(frame["number"]),
            kind=str(frame["kind"]),
            text=str(frame["text"]),
            steps=int(frame["steps"]),
            state=state,
        )

    @property
    def failed(self) -> bool:
        return bool(self.kind)


@dataclass(frozen=True, slots=True)
class Position:
    """The position of the rank that asks for a verdict; its exchange cannot succeed."""

    rank: int
    exchange: str
    """``exchange 41: gradients of adam``"""
    steps: int
    """Training steps that it has done."""
    line: str
    """The line of its program: ``train.py:30``; empty if not known."""


def cannot_succeed(number: int, reports: Mapping[int, ExitReport]) -> bool:
    """Whether exchange ``number`` can no longer succeed, given these reports."""
    return any(said.failed or said.number < number for said in reports.values())


def verdict(
    number: int,
    died: Collection[int],
    reports: Mapping[int, ExitReport],
    here: Position | None = None,
) -> CollectiveError | None:
    """The root cause of the failure of exchange ``number``; None if it is unknown.

    ``died`` are the ranks that have left without a report, and ``here`` describes the
    rank that asks.
    """
    if died:
        who = ", ".join(map(str, sorted(died)))
        return PeerLostError(
            f"rank {who} has left: its process ended or the connection to it broke"
        )
    for rank, said in sorted(reports.items()):
        if said.failed:
            return _passed_on(rank, said, number)
    for rank, said in sorted(reports.items()):
        if said.number < number:
            if not said.text and here and (said.steps or here.steps):
                return CollectiveMismatchError(_unequal_text(rank, said, here))
            return PeerLostError(_ended_text(rank, said))
    return None


def _passed_on(rank: int, said: ExitReport, number: int) -> CollectiveError:
    """The error to raise for another rank's failure.

    It has the same class if that rank failed in the same exchange.
    """
    kind = _KINDS.get(said.kind)
    if kind is None or (said.number != number and kind is not PeerLostError):
        return PeerLostError(f"rank {rank} has left: {said.text}")
    return kind(said.text)


def _ended_text(rank: int, said: ExitReport) -> str:
    after = f"after exchange {said.number}" if said.number else "before any exchange"
    why = f": {said.text}" if said.text else ""
    return f"rank {rank} has left {after}: its program has ended{why}"


def _unequal_text(rank: int, said: ExitReport, here: Position) -> str:
    """The message for a program that ended without an error, but before another."""
    where = f" at {here.line}" if here.line else ""
    return (
        f"the ranks took different numbers of steps: rank {rank} ended its program "
        f"after step {said.steps}, while rank {here.rank} continues after step "
        f"{here.steps} ({here.exchange}){where}. Rank {rank} decided to end because of "
        "values that differ between ranks: the loss of its own rows, a clock, random "
        "numbers. Use values that are equal on all ranks: metric.result(), or "
        "tfcluster.runtime.allreduce(loss)"
    )
