"""Sort the tensors, IndexedSlices and Nones of a list, and put them back in order.

All exchanges of gradients use this. Nones are not sent. The others are sent as one flat
list: the dense tensors, the slices' values, the slices' indices.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import tensorflow as tf

from tfcluster.runtime.collective import tensor_words
from tfcluster.runtime.collective.sparse import Slices
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.tensors import as_tensor, is_sparse

D = TypeVar("D")
S = TypeVar("S")


class Kind(enum.Enum):
    """The kind of a list's entry; the values distinguish lists in messages."""

    NONE = "-"
    DENSE = "d"
    SPARSE = "s"

    @classmethod
    def of(cls, value: Any) -> Kind:
        """The kind of ``value``."""
        if value is None:
            return cls.NONE
        return cls.SPARSE if is_sparse(value) else cls.DENSE

    def words(self, name: str, dtype: str, shape: Sequence[int | None]) -> str:
        """The entry in a signature, such as ``rows of table float32 [3, 4]``."""
        if self is Kind.NONE:
            return f"{name} without gradient"
        words = tensor_words(name, dtype, shape)
        return f"rows of {words}" if self is Kind.SPARSE else words


@dataclass(frozen=True, slots=True)
class TensorList:
    """The entries of a list by kind."""

    kinds: tuple[Kind, ...]
    """The kind of each entry, in the program's order."""
    flat: tuple[Any, ...]
    """The dense tensors, the slices' values, the slices' indices."""
    shapes: tuple[Any, ...]
    """The ``dense_shape`` of each IndexedSlices, a tensor or None."""

    @classmethod
    def of(cls, values: Sequence[Any]) -> TensorList:
        """Sort ``values``, each a tensor (or convertible), IndexedSlices or None."""
        kinds = tuple(map(Kind.of, values))
        dense = [v for v, kind in zip(values, kinds, strict=True) if kind is Kind.DENSE]
        sparse = [
            v for v, kind in zip(values, kinds, strict=True) if kind is Kind.SPARSE
        ]
        return cls(
            kinds,
            (
                *map(as_tensor, dense),
                *(as_tensor(slices.values) for slices in sparse),
                *(as_tensor(slices.indices) for slices in sparse),
            ),
            tuple(slices.dense_shape for slices in sparse),
        )

    @property
    def dense_count(self) -> int:
        """The number of dense tensors."""
        return len(self.flat) - 2 * len(self.shapes)

    @property
    def summed_count(self) -> int:
        """How many tensors of ``flat`` are summed: all but the indices."""
        return len(self.flat) - len(self.shapes)

    @property
    def indices(self) -> tuple[Any, ...]:
        """The slices' indices."""
        return self.flat[self.summed_count :]

    def with_flat(self, flat: Sequence[Any]) -> TensorList:
        """A list of the same kinds with other tensors, in the order of ``flat``."""
        return replace(self, flat=tuple(flat))

    def unflattened(
        self, arrays: Sequence[Array]
    ) -> tuple[Sequence[Array], list[Slices]]:
        """The dense arrays and the slices, from arrays in the order of ``flat``."""
        dense, summed = self.dense_count, self.summed_count
        pairs = zip(arrays[dense:summed], arrays[summed:], strict=True)
        return arrays[:dense], [Slices(*pair) for pair in pairs]

    def in_order(self, dense: Sequence[D], sparse: Sequence[S]) -> list[D | S | None]:
        """The values in the program's order, with None for each entry that was None."""
        found: dict[Kind, Iterator[Any]] = {
            Kind.DENSE: iter(dense),
            Kind.SPARSE: iter(sparse),
            Kind.NONE: itertools.repeat(None),
        }
        return [next(found[kind]) for kind in self.kinds]

    def tensors(self) -> list[Any]:
        """The entries in the program's order: tensors, IndexedSlices and None."""
        dense, summed = self.dense_count, self.summed_count
        values, indices = self.flat[dense:summed], self.flat[summed:]
        slices = [
            tf.IndexedSlices(*each)
            for each in zip(values, indices, self.shapes, strict=True)
        ]
        return self.in_order(self.flat[:dense], slices)


def flattened(dense: Sequence[Array], sparse: Sequence[Slices]) -> list[Array]:
    """Arrays and slices in the order of ``TensorList.flat``."""
    return [
        *dense,
        *(slices.values for slices in sparse),
        *(slices.indices for slices in sparse),
    ]
