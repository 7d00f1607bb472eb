"""What programs get: tensors, this rank's rows of tensors, and handles."""

from __future__ import annotations

from dataclasses import dataclass

import tensorflow as tf

from tfcluster.runtime.partition.divided_variables import DividedVariable
from tfcluster.runtime.partition.placement import HandleOf, Placement, Shape, Shard
from tfcluster.runtime.partition.shape_graph import Argument
from tfcluster.runtime.tensor_types import Tensor

_HANDLES = (tf.resource, tf.variant)


@dataclass(frozen=True, slots=True)
class RowPart:
    """What a tensor is a part of, if it holds only this rank's rows."""

    shard: Shard
    shape: Shape
    """The shape of the whole tensor."""


@dataclass(frozen=True, slots=True)
class ProgramInput:
    """A tensor that a program gets."""

    tensor: Tensor
    part: RowPart | None = None
    table: DividedVariable | None = None
    """The divided variable to which the tensor, a handle, refers."""

    @property
    def placement(self) -> Placement | None:
        """The placement, if this process does not have the whole tensor."""
        return self.shard if self.table is None else HandleOf(self.table.shard)

    @property
    def tensors(self) -> list[Tensor]:
        """What the program gets: one tensor, or the handles of the ranks' pieces."""
        return [self.tensor] if self.table is None else self.table.handles

    def held(self, placement: Placement, pieces: int) -> list[Tensor]:
        """What it gets if it has this placement, with so many pieces of a variable.

        The whole variable stands for pieces that are not there yet.
        """
        if self.table is None and isinstance(placement, HandleOf):
            return [self.tensor] * pieces
        return self.tensors

    @property
    def shape(self) -> Shape:
        """The shape of the whole tensor."""
        return tuple(self.tensor.shape) if self.part is None else self.part.shape

    @property
    def shard(self) -> Shard | None:
        """The placement, if the tensor is a part."""
        return None if self.part is None else self.part.shard

    @property
    def is_data(self) -> bool:
        """Whether it holds numbers, or strings: a single one may be a file's name."""
        handles = _HANDLES if self.shape else (*_HANDLES, tf.string)
        return self.tensor.dtype not in handles

    def argument(self) -> Argument:
        if self.tensor.dtype in _HANDLES or self.part is None:
            return Argument.of(self.tensor)
        return Argument(self.tensor.dtype, self.part.shape)
