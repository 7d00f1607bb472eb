"""A list of tensors, IndexedSlices and Nones, as it is sent.

All reductions of gradients use this. Nones are not sent. The other entries are sent as
one flat list: the dense tensors, the slices' values, the slices' indices.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import tensorflow as tf

from tfcluster.runtime.collective import tensor_words
from tfcluster.runtime.collective.sparse import Slices
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.tensor_types import Gradient, Tensor
from tfcluster.runtime.tensors import as_tensor, is_sparse

D = TypeVar("D")
S = TypeVar("S")


class Kind(enum.Enum):
    """The kind of a list's entry; the values distinguish lists in messages."""

    NONE = "-"
    DENSE = "d"
    SPARSE = "s"

    @classmethod
    def of(cls, value: Gradient) -> Kind:
        """The kind of ``value``, a tensor (or convertible), IndexedSlices or None."""
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
    """The entries of a list by kind.

    In each IndexedSlices, the values have shape (n, ...), the indices are int32 or
    int64 of shape (n,), and the ``dense_shape`` is an integer vector or None.
    """

    kinds: tuple[Kind, ...]
    """The kind of each entry, in the program's order."""
    flat: tuple[Tensor, ...]
    """The dense tensors, the slices' values, the slices' indices."""
    shapes: tuple[Tensor | None, ...]
    """The ``dense_shape`` of each IndexedSlices."""

    @classmethod
    def of(cls, values: Sequence[Gradient]) -> TensorList:
        """Sort ``values``, each a tensor (or convertible), IndexedSlices or None.

        Raises ValueError or TypeError for a value that TensorFlow cannot convert.
        """
        kinds = tuple(map(Kind.of, values))
        dense = [v for v in values if v is not None and not is_sparse(v)]
        sparse = [v for v in values if is_sparse(v)]
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
        """The number of tensors of ``flat`` that are summed: all except the indices."""
        return len(self.flat) - len(self.shapes)

    def with_flat(self, flat: Sequence[Tensor]) -> TensorList:
        """A list of the same kinds with other tensors, in the order of ``flat``.

        There must be as many as in ``flat``.
        """
        # Not dataclasses.replace, which takes four times as long.
        return TensorList(self.kinds, tuple(flat), self.shapes)

    def unflattened(
        self, arrays: Sequence[Array]
    ) -> tuple[Sequence[Array], list[Slices]]:
        """The dense arrays and the slices, from arrays in the order of ``flat``.

        Raises ValueError if the numbers of values and indices differ.
        """
        dense, summed = self.dense_count, self.summed_count
        pairs = zip(arrays[dense:summed], arrays[summed:], strict=True)
        return arrays[:dense], [Slices(*pair) for pair in pairs]

    def in_order(self, dense: Sequence[D], sparse: Sequence[S]) -> list[D | S | None]:
        """The values in the program's order, with None for each entry that was None.

        ``dense`` and ``sparse`` have a value for each entry of these kinds.
        """
        if len(dense) == len(self.kinds):
            return list(dense)
        iterators: dict[Kind, Iterator[D | S | None]] = {
            Kind.DENSE: iter(dense),
            Kind.SPARSE: iter(sparse),
            Kind.NONE: itertools.repeat(None),
        }
        return [next(iterators[kind]) for kind in self.kinds]

    def tensors(self) -> list[Gradient]:
        """The entries in the program's order: tensors, IndexedSlices and None."""
        dense, summed = self.dense_count, self.summed_count
        values, indices = self.flat[dense:summed], self.flat[summed:]
        slices = [
            tf.IndexedSlices(*each)
            for each in zip(values, indices, self.shapes, strict=True)
        ]
        return self.in_order(self.flat[:dense], slices)
