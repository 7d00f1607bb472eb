"""Why ranks have left, and which of them is to blame. Pure.

A rank that fails says why before it hangs up, and a program that ends says so; a
process that is killed says nothing. So the others need not take for the culprit whoever
they happen to be connected to.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tfcluster.runtime.collective.errors import (
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
class Farewell:
    """A rank's last words."""

    number: int
    """Of the last exchange that it did, or failed in."""
    kind: str = ""
    """The error's class; empty for a program that has just ended."""
    text: str = ""
    """The error's message, or why the program has ended."""

    def as_frame(self) -> dict[str, Any]:
        text = self.text[:_MAX_TEXT]
        return {"number": self.number, "kind": self.kind, "text": text}

    @classmethod
    def of_frame(cls, frame: Mapping[str, Any]) -> Farewell:
        """Raises KeyError, TypeError or ValueError for anything else."""
        return cls(int(frame["number"]), str(frame["kind"]), str(frame["text"]))

    @property
    def failed(self) -> bool:
        return bool(self.kind)


def hopeless(number: int, farewells: Mapping[int, Farewell]) -> bool:
    """Whether an exchange cannot succeed any more, after what was said."""
    return any(said.failed or said.number < number for said in farewells.values())


def verdict(
    number: int, died: Collection[int], farewells: Mapping[int, Farewell]
) -> CollectiveError | None:
    """What the failure of an exchange is really due to; None if nothing is known.

    ``died``: ranks that have left without a word.
    """
    if died:
        who = ", ".join(map(str, sorted(died)))
        return PeerLostError(
            f"rank {who} has left: its process ended or the connection to it broke"
        )
    for rank, said in sorted(farewells.items()):
        if said.failed:
            return _passed_on(rank, said, number)
    for rank, said in sorted(farewells.items()):
        if said.number < number:
            return PeerLostError(_ended_text(rank, said))
    return None


def _passed_on(rank: int, said: Farewell, number: int) -> CollectiveError:
    """The error of another rank: our own too, where we were in it together."""
    kind = _KINDS.get(said.kind)
    if kind is None or (said.number != number and kind is not PeerLostError):
        return PeerLostError(f"rank {rank} has left: {said.text}")
    return kind(said.text)


def _ended_text(rank: int, said: Farewell) -> str:
    after = f"after exchange {said.number}" if said.number else "before any exchange"
    why = f": {said.text}" if said.text else ""
    return f"rank {rank} has left {after}: its program has ended{why}"
