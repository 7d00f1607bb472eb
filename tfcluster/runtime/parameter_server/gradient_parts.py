"""The parts of a step's gradients, one from each rank, and how they are joined. Pure.

All ranks of a synchronous model have the same gradients. So each sends its part of
every array, and together they send each number once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tfcluster.runtime.collective.sparse import Slices
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.parameter_server.sharding import Gradient


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of every array a rank sends: part ``number`` of ``count``.

    Part -1 is empty.
    """

    number: int
    count: int

    def of(self, kinds: str, arrays: Sequence[Array]) -> list[Array]:
        """This part of the arrays of gradients of these kinds (see ``client.Pack``).

        Dense arrays are flattened; of slices, some entries are chosen.
        """
        rest, found = iter(arrays), []
        for kind in kinds:
            if kind == "d":
                found.append(self._chosen(next(rest).reshape(-1)))
            elif kind == "s":
                found += [self._chosen(next(rest)), self._chosen(next(rest))]
        return found

    def _chosen(self, array: Array) -> Array:
        if self.number < 0:
            return array[:0]
        size = len(array)
        start = self.number * size // self.count
        return array[start : (self.number + 1) * size // self.count]


@dataclass(frozen=True, slots=True)
class Pushed:
    """The parts of gradients that one rank has pushed, in the order of the pieces."""

    kinds: str
    gradients: Sequence[Gradient]


def difference(pushed: Mapping[int, Pushed]) -> str | None:
    """A sentence on how the kinds of the ranks' gradients differ; None if equal."""
    (first, expected), *others = sorted(pushed.items())
    for rank, other in others:
        for index, (a, b) in enumerate(zip(expected.kinds, other.kinds, strict=False)):
            if a != b:
                return (
                    f"rank {first} has {_WORDS[a]} for piece {index}, rank {rank} has "
                    f"{_WORDS[b]}"
                )
    return None


_WORDS = {"d": "an array", "s": "rows", "-": "no gradient"}


def whole_gradients(
    pushed: Mapping[int, Pushed], shapes: Sequence[Sequence[int]]
) -> list[Gradient]:
    """The whole gradients of pieces of these shapes, from the parts of all ranks.

    All ranks have the same kinds and dtypes. Raises ValueError if parts are missing.
    """
    columns = zip(*(pushed[rank].gradients for rank in sorted(pushed)), strict=True)
    return [
        _joined(column, shape) for column, shape in zip(columns, shapes, strict=True)
    ]


def _joined(column: Sequence[Gradient], shape: Sequence[int]) -> Gradient:
    slices = [part for part in column if isinstance(part, Slices)]
    if slices:
        return Slices(
            _concatenated([part.values for part in slices]),
            _concatenated([part.indices for part in slices]),
        )
    arrays = [part for part in column if isinstance(part, np.ndarray)]
    return _concatenated(arrays).reshape(shape) if arrays else None


def _concatenated(parts: Sequence[Array]) -> Array:
    filled = [part for part in parts if len(part)]
    if len(filled) == 1:
        return filled[0]
    return np.concatenate(parts)
