"""Slice a batch into the ranks' parts. Stateless.

Rank ``r`` of ``N`` gets rows ``[r*B//N, (r+1)*B//N)`` of B. Works on eager and symbolic
tensors, ragged and sparse tensors and numpy arrays, in any nested structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfcluster.runtime.keras.batches.batch_sharding import bounds
from tfcluster.runtime.keras.session import Share
from tfcluster.runtime.tensor_types import (
    DTypeLike,
    Flag,
    Leaf,
    Nest,
    Number,
    Tensor,
    Weight,
)

Rows: TypeAlias = Any
"""A tensor (dense, ragged or sparse) or array whose first dimension is the rows. Not a
union, since mypy cannot narrow a union by ``isinstance`` of an untyped class."""


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of a batch and its share."""

    data: Nest
    share: Share


def take_part(data: Nest, rank: int, size: int) -> Part:
    """This rank's rows of a global batch.

    Leaves are tensors (dense, ragged or sparse) and arrays of shape (rows, ...) and any
    dtype; others are passed on. Structure, dtypes and other dimensions stay. Fields of
    the share are numbers if the number of rows is known, else scalar tensors. A rank
    without rows gets the first row, with weight 0. If the tensors do not all have the
    same number of rows, they cannot be divided, and every rank gets all rows.
    """
    leaves = [leaf for leaf in tf.nest.flatten(data) if has_rows(leaf)]
    if not leaves:
        return Part(data, _of_the_chief(rank))
    batch, common = common_rows(leaves)
    if not isinstance(batch, int) or not isinstance(common, bool):
        return _dynamic_part(data, leaves, batch, common, rank, size)
    if not common or not batch:
        return Part(data, _of_the_chief(rank))
    start, stop = bounds(batch, rank, size)
    rows = stop - start
    if not rows:
        start, stop = 0, 1
    share = Share(
        rows=float(rows),
        counts=rows > 0,
        total=float(batch),
        first=start,
    )
    return Part(_slice_all(data, start, stop), share)


def common_rows(leaves: Sequence[Rows]) -> tuple[Number, Flag]:
    """The number of rows of the first tensor, and whether all tensors have the same.

    ``leaves`` have at least one dimension, and there is at least one. Returns an int
    and a bool if these are known, else scalar tensors of int64 and bool. A square
    matrix next to other tensors may be the adjacency matrix of a graph. Then the batch
    is one graph and must not be divided by its nodes, so the second result is false.
    """
    counts: list[Any] = [rows_in(leaf) for leaf in leaves]
    common: Any
    if all(isinstance(count, int) for count in counts):
        common = len(set(counts)) == 1
    else:
        counts = [tf.cast(count, tf.int64) for count in counts]
        common = tf.reduce_all(tf.equal(tf.stack(counts), counts[0]))
    if len(leaves) > 1:
        for leaf in leaves:
            graph = _is_adjacency(leaf)
            if graph is not False:
                common = tf.logical_and(common, tf.logical_not(graph))
    if tf.is_tensor(common) and hasattr(common, "numpy"):
        common = bool(common)
    return counts[0], common


_SMALLEST_GRAPH = 4
"""The smallest adjacency matrix; smaller matrices are often symmetric by chance."""


def _is_adjacency(leaf: Rows) -> Flag:
    """Whether a tensor is an adjacency matrix: False, or a scalar boolean tensor."""
    if isinstance(leaf, tf.RaggedTensor) or leaf.shape is None:
        return False
    shape = tuple(leaf.shape) if isinstance(leaf, np.ndarray) else leaf.shape.as_list()
    known = {length for length in shape if length is not None}
    if len(shape) != 2 or len(known) > 1 or not _is_numeric(leaf.dtype):
        return False
    if known and min(known) < _SMALLEST_GRAPH:
        return False
    if isinstance(leaf, tf.SparseTensor):
        lengths = leaf.dense_shape
        found: Tensor = tf.equal(lengths[0], lengths[1]) & (
            lengths[0] >= _SMALLEST_GRAPH
        )
        return found
    matrix = tf.convert_to_tensor(leaf)
    lengths = tf.shape(matrix)

    def symmetric() -> Tensor:
        there = tf.cast(matrix, tf.bool)
        alike = tf.reduce_all(tf.equal(there, tf.transpose(there)))
        equal = tf.reduce_all(tf.equal(matrix, tf.transpose(matrix)))
        # A matrix without zeros must equal its transpose: a normalised adjacency has
        # zeros.
        found: Tensor = alike & (equal | ~tf.reduce_all(there))
        return found

    square = tf.equal(lengths[0], lengths[1]) & (lengths[0] >= _SMALLEST_GRAPH)
    decided: Tensor = tf.cond(square, symmetric, lambda: tf.constant(False))
    return decided


def _is_numeric(dtype: DTypeLike) -> bool:
    kind = tf.as_dtype(dtype)
    return bool(kind.is_floating or kind.is_integer or kind.is_bool)


def _dynamic_part(
    data: Nest,
    leaves: Sequence[Rows],
    batch: Number,
    common: Flag,
    rank: int,
    size: int,
) -> Part:
    counts = [tf.cast(rows_in(leaf), tf.int64) for leaf in leaves]
    batch = tf.cast(batch, tf.int64)
    start = rank * batch // size
    rows = (rank + 1) * batch // size - start
    empty = tf.equal(rows, 0)
    first = tf.where(tf.logical_or(empty, ~common), tf.zeros_like(start), start)
    last = tf.where(empty, tf.minimum(batch, 1), start + rows)
    last = tf.where(common, last, tf.reduce_max(tf.stack(counts)))
    chiefs = _of_the_chief(rank)
    share = Share(
        rows=tf.where(common, tf.cast(rows, tf.float64), _float(chiefs.rows)),
        counts=tf.where(common, ~empty, chiefs.counts),
        total=tf.where(common, tf.cast(batch, tf.float64), _float(1.0)),
        first=first,
        undivided=tf.logical_not(common),
    )
    return Part(_slice_all(data, first, last), share)


def _of_the_chief(rank: int) -> Share:
    """The share if all ranks compute the same batch, so that only the chief counts.

    The ranks are not averaged, because with sparse gradients an optimizer would get
    each row N times.
    """
    return Share.undivided_batch(counts=rank == 0, weight=float(rank == 0))


def _float(number: Weight) -> Tensor:
    constant: Tensor = tf.constant(number, tf.float64)
    return constant


def slice_rows(leaf: Rows, start: Number, stop: Number) -> Rows:
    """Rows ``[start, stop)`` of one tensor or array.

    The dtype and the other dimensions stay.
    """
    if not isinstance(leaf, tf.SparseTensor):
        return leaf[start:stop]
    shape = leaf.dense_shape
    begin = tf.concat([[tf.cast(start, tf.int64)], tf.zeros_like(shape[1:])], 0)
    length = tf.concat([[tf.cast(stop - start, tf.int64)], shape[1:]], 0)
    piece = tf.sparse.slice(leaf, begin, length)
    piece.set_shape([None, *leaf.shape[1:]])
    return piece


def slice_some(nest: Nest, some: Sequence[Leaf], start: Number, stop: Number) -> Nest:
    """``nest`` with only rows ``[start, stop)`` of its leaves that are in ``some``."""

    def piece(leaf: Leaf) -> Leaf:
        if not any(leaf is other for other in some):
            return leaf
        return slice_rows(tf.convert_to_tensor(leaf), start, stop)

    return tf.nest.map_structure(piece, nest)


def twice(leaf: Rows) -> Rows:
    """All rows of a tensor, followed by all rows again: twice as many rows.

    The dtype and the other dimensions stay; an array becomes a tensor.
    """
    if isinstance(leaf, tf.SparseTensor):
        return tf.sparse.concat(0, [leaf, leaf])
    return tf.concat([leaf, leaf], 0)


def has_rows(leaf: Leaf) -> bool:
    """Whether this leaf of a batch has a first dimension."""
    if isinstance(leaf, np.ndarray):
        return leaf.ndim > 0
    if isinstance(leaf, tf.Tensor | tf.RaggedTensor | tf.SparseTensor):
        return leaf.shape.rank is None or leaf.shape.rank > 0
    return False


def has_dense_rows(leaf: Leaf) -> bool:
    """Whether this leaf has rows and is neither ragged nor sparse."""
    return isinstance(leaf, tf.Tensor | np.ndarray) and has_rows(leaf)


def rows_in(leaf: Rows) -> Number:
    """The number of rows: an int if it is known, else a scalar tensor.

    The dtype is int64, or for a ragged tensor the dtype of its row splits.
    """
    if isinstance(leaf, np.ndarray):
        return int(leaf.shape[0])
    known = leaf.shape[0] if leaf.shape.rank is not None else None
    if known is not None:
        return int(known)
    if isinstance(leaf, tf.RaggedTensor):
        found: Tensor = leaf.nrows()
        return found
    if isinstance(leaf, tf.SparseTensor):
        length: Tensor = leaf.dense_shape[0]
        return length
    rows: Tensor = tf.shape(leaf, out_type=tf.int64)[0]
    return rows


def _slice_all(data: Nest, start: Number, stop: Number) -> Nest:
    return tf.nest.map_structure(
        lambda leaf: slice_rows(leaf, start, stop) if has_rows(leaf) else leaf, data
    )
