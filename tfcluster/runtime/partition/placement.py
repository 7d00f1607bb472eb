"""Where the parts of a tensor are. Pure.

The names are those of ``torch.distributed.tensor``. A batch has B rows, and rank r of N
has the rows from r*B//N to (r+1)*B//N.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tfcluster.runtime.collective.shard_sums import Node, subtrees

Shape: TypeAlias = tuple[int | None, ...]
"""The shape of a tensor; an unknown size is None."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank has the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Shard:
    """Every rank has its rows of the dimension ``dim``.

    The entries of the dimension are numbered by ``(outer, row, inner)``: it has
    ``outer * rows * inner`` entries, and a row of the batch is ``inner`` successive
    entries in each of ``outer`` blocks. So a reshape may merge the rows with other
    dimensions.
    """

    dim: int
    rows: int
    outer: int = 1
    inner: int = 1

    @property
    def size(self) -> int:
        """The number of entries of the dimension."""
        return self.outer * self.rows * self.inner

    @property
    def block(self) -> int:
        """The number of successive entries that hold all rows once."""
        return self.rows * self.inner

    def fits(self, shape: Shape | None) -> bool:
        """Whether a tensor of this shape can be divided so."""
        if shape is None or not self.dim < len(shape) or self.size == 0:
            return False
        # A part of several blocks is taken by a reshape.
        enough = self.outer == 1 or shape.count(None) <= 1
        return shape[self.dim] == self.size and enough

    def at(self, dim: int) -> Shard:
        """The same rows in another dimension."""
        return replace(self, dim=dim)

    def with_outer(self, outer: int) -> Shard:
        """The same rows, in another number of blocks."""
        return replace(self, outer=outer)

    def reshaped(self, old: Sequence[int], new: Sequence[int]) -> Shard | None:
        """The placement of the tensor reshaped from ``old`` to ``new``.

        None if the rows are then in no single dimension, or if there are no elements.
        """
        outer = math.prod(old[: self.dim]) * self.outer
        inner = self.inner * math.prod(old[self.dim + 1 :])
        if outer == 0 or inner == 0:
            return None
        for dim, size in enumerate(new):
            before, after = math.prod(new[:dim]), math.prod(new[dim + 1 :])
            if before and after and outer % before == 0 and inner % after == 0:
                shard = Shard(dim, self.rows, outer // before, inner // after)
                if shard.size == size:
                    return shard
        return None

    def __str__(self) -> str:
        factors = "" if self.outer == self.inner == 1 else f":{self.outer}x{self.inner}"
        return f"S({self.dim}{factors})"


@dataclass(frozen=True, slots=True)
class Partial:
    """Every rank has a term; the tensor is their ``op``: "sum", "max" or "min"."""

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


@dataclass(frozen=True, slots=True)
class ListOf:
    """A TensorList, all of whose elements have the placement ``element``.

    None stands for a list that has no elements yet.
    """

    element: Replicate | Shard | None

    def __str__(self) -> str:
        return f"L({self.element or '?'})"


@dataclass(frozen=True, slots=True)
class HandleOf:
    """The handle of a variable that is divided: every rank's has the rank's rows."""

    element: Shard

    def __str__(self) -> str:
        return f"H({self.element})"


@dataclass(frozen=True, slots=True)
class ByOwner:
    """Every rank has the entries whose indices name its rows of a divided variable.

    There is an entry for each index. What a rank has of them is in one dimension, in
    the order of the whole tensor.
    """

    ids: Any
    """The indices, a ``graph.Value``."""
    rows: int
    """How many rows the variable has."""
    home: Shard
    """How the tensor is divided before, or afterwards: as the indices are."""

    def __str__(self) -> str:
        return f"O({self.rows})"


Placement: TypeAlias = Replicate | Shard | Partial | ListOf | HandleOf | ByOwner

REPLICATE = Replicate()
SUM = Partial("sum")


def is_whole(placement: Placement) -> bool:
    """Whether every rank has the whole tensor, or the whole list."""
    return placement in (REPLICATE, ListOf(REPLICATE), ListOf(None))


def at_home(placement: Placement) -> Placement:
    """The placement in which nodes use what ranks looked up for each other."""
    return placement.home if isinstance(placement, ByOwner) else placement


@dataclass(frozen=True, slots=True)
class Split:
    """The rows of rank ``rank`` of ``size``."""

    rank: int
    size: int

    def first(self, rows: int) -> int:
        """The first of the rank's rows, of ``rows`` in all."""
        return self.rank * rows // self.size

    def count(self, rows: int) -> int:
        """The number of the rank's rows, of ``rows`` in all."""
        return (self.rank + 1) * rows // self.size - self.first(rows)

    def local_block(self, shard: Shard) -> int:
        """The rank's part of ``shard.block``."""
        return self.count(shard.rows) * shard.inner

    def local_size(self, shard: Shard) -> int:
        """The rank's part of ``shard.size``."""
        return shard.outer * self.local_block(shard)

    def local_shape(self, shape: Sequence[int | None], placement: Placement) -> Shape:
        """The shape of the rank's part of a tensor of this shape."""
        sizes = list(shape)
        if isinstance(placement, Shard):
            sizes[placement.dim] = self.local_size(placement)
        return tuple(sizes)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks among which a batch is divided, and those of this process.

    The process has successive ranks. If ``ordered``, the processes compute the same
    bits whichever ranks each of them has.
    """

    size: int
    local: tuple[int, ...]
    ordered: bool = False

    @property
    def splits(self) -> list[Split]:
        return [Split(rank, self.size) for rank in self.local]

    @property
    def exchanges(self) -> bool:
        """Whether there are other processes."""
        return len(self.local) < self.size

    @property
    def nodes(self) -> list[Node]:
        """The subtrees whose terms this process adds up; see ``shard_tree``."""
        return subtrees(self.size, self.local[0], self.local[-1] + 1)


def joined(first: Placement, second: Placement) -> tuple[Placement, bool]:
    """One placement for a tensor that has two, in a loop or in two branches.

    Also returns whether it must not be changed any more, so that a fixed point is
    reached.
    """
    if first == second:
        return first, False
    if isinstance(first, ListOf) and isinstance(second, ListOf):
        if first.element is None:
            return second, False
        if second.element is None:
            return first, False
        element, final = joined(first.element, second.element)
        if isinstance(element, Shard):
            return ListOf(element), final
        return ListOf(REPLICATE), final
    if isinstance(first, ListOf) or isinstance(second, ListOf):
        return ListOf(REPLICATE), True
    for one, other in ((first, second), (second, first)):
        if one == REPLICATE and (isinstance(other, Shard) or other == SUM):
            return other, False
    return REPLICATE, True
