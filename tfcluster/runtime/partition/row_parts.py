"""Tensors of the program of which this rank has its rows only."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from tfcluster.runtime.partition import tf_functions
from tfcluster.runtime.partition.exchange import Exchanger
from tfcluster.runtime.partition.placement import Ranks
from tfcluster.runtime.partition.program_inputs import ProgramInput, RowPart
from tfcluster.runtime.partition.programs import gather
from tfcluster.runtime.partition.rewrite import Written
from tfcluster.runtime.tensor_types import Tensor

Running = Callable[[str, Written], AbstractContextManager[None]]
"""A context in which a program of this name runs; see ``op_runs.OpRuns.running``."""


class RowParts:
    """Knows which tensors are parts, and makes them whole.

    ``new_exchanger`` makes what exchanges the rows; None if it never does.
    """

    def __init__(
        self,
        ranks: Ranks,
        new_exchanger: Callable[[str], Exchanger] | None,
        running: Running,
    ) -> None:
        self._ranks = ranks
        self._new_exchanger = new_exchanger
        self._running = running
        self._parts: dict[int, tuple[object, RowPart]] = {}
        """By the ``id`` of the tensor, each with a reference that ends the entry."""
        self._gathers: dict[object, Written] = {}

    def __bool__(self) -> bool:
        return bool(self._parts)

    def of(self, tensor: Tensor) -> RowPart | None:
        """What a tensor is a part of; None if it is whole."""
        entry = self._parts.get(id(tensor))
        return None if entry is None else entry[1]

    def note(self, tensor: Tensor, part: RowPart) -> None:
        """Note that a tensor is a part."""
        key, parts = id(tensor), self._parts
        parts[key] = weakref.ref(tensor, lambda _: parts.pop(key, None)), part

    def gathered(self, values: Sequence[ProgramInput]) -> list[Tensor]:
        """The whole tensors. All ranks must call this, unless no value is a part."""
        parts = [value for value in values if value.part is not None]
        if not parts:
            return [value.tensor for value in values]
        key = tuple((value.tensor.dtype, value.part) for value in parts)
        written = self._gathers.get(key)
        if written is None:
            written = gather(parts, self._ranks, self._new_exchanger)
            self._gathers[key] = written
        inputs = [value.tensor for value in parts]
        with self._running("gather", written):
            wholes = iter(tf_functions.call(written.name, inputs, len(inputs)))
        return [
            value.tensor if value.part is None else next(wholes) for value in values
        ]
