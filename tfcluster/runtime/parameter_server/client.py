"""What a training task knows of the ps tasks: push gradients, get fresh weights.

Numpy only. Safe to use from several threads; one exchange at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from tfcluster.runtime.collective.sparse import Slices
from tfcluster.runtime.parameter_server.placement import Piece, Placement, Variable

Array = NDArray[Any]
Gradient = Array | Slices | None
Pack = Callable[[Sequence[Piece], str], bytes]
"""The update of one ps' pieces as ``graphs.serialised`` gives it, for gradients of
these kinds: a letter for each piece, ``d`` an array, ``s`` Slices, ``-`` none."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What has changed of a variable: ``values[i]`` is its row ``indices[i]`` now."""

    values: Array
    indices: Array


@dataclass(frozen=True, slots=True)
class Opened:
    """A model whose master copy the ps tasks have."""

    values: list[Array]
    """What the variables are to be now, in the model's order."""
    version: int
    """Steps that had been applied before."""
    defined: bool
    """This task's values became the first ones."""
    placement: Placement


class Servers:
    """This task's connections to all ps tasks."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        rank: int,
        size: int,
        token: bytes,
        attempt: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        """Connect. Raises CollectiveTimeoutError where one does not come in time."""
        self.waited_s = 0.0
        self.sent_bytes = 0
        self.received_bytes = 0

    def open(
        self,
        model: str,
        variables: Sequence[Variable],
        values: Sequence[Array],
        kinds: str,
        pack: Pack,
        *,
        synchronous: bool = False,
        splittable: bool = False,
        together: bool = False,
    ) -> Opened:
        """Have the ps tasks keep ``model``; whoever comes first gives it its values.

        ``kinds`` are those of the gradients that will be pushed, as far as is known (a
        letter for each variable): ``pack`` is called, within this call and later, for
        what the ps tasks lack. ``splittable``: each row may be updated by itself.
        ``together``: the update needs all gradients at once, so one ps gets all.

        Raises CollectiveMismatchError where the variables are not those of the others.
        """
        raise NotImplementedError

    def push(
        self, model: str, gradients: Sequence[Gradient], *, weight: float = 1.0
    ) -> list[Array | Rows | None]:
        """Have gradients applied; what the variables are then, in the model's order.

        A variable that nobody has changed since this task last saw it may be None.
        Synchronous: returns once all tasks have pushed and the mean was applied.
        """
        raise NotImplementedError

    def pull(self, model: str) -> list[Array]:
        """All variables as they are now."""
        raise NotImplementedError

    def slots(self, model: str) -> dict[str, Array]:
        """The optimizer's own variables by path, pieces put together."""
        raise NotImplementedError

    def assign(self, model: str, path: str, value: Array) -> None:
        """Set a variable, or one of the optimizer's own, by path on all ps."""
        raise NotImplementedError

    def put(self, key: str, text: str) -> None:
        """Leave a note for the others (on ps:0)."""
        raise NotImplementedError

    def get(self, key: str) -> str | None:
        """The note of that name."""
        raise NotImplementedError

    def notes(self, prefix: str = "") -> dict[str, str]:
        """All notes whose names begin so."""
        raise NotImplementedError

    def statistics(self) -> list[Mapping[str, Any]]:
        """Of each ps: steps, dropped, staleness (mean, max), bytes held and moved."""
        raise NotImplementedError

    def close(self) -> None:
        """Say good-bye."""
