"""Combines sparse gradients (``tf.IndexedSlices``, for example of embeddings).

There are two ways. The cost of an all-gather of the rows grows with the number of rows
on all ranks. The cost of an all-reduce of the dense gradient grows with the size of the
variable. The choice depends only on numbers that every rank knows, so all ranks choose
the same way. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tfcluster.runtime.collective.transports.base import Array


@dataclass(frozen=True, slots=True)
class Slices:
    """Some rows of a larger array: ``values[i]`` belongs to row ``indices[i]``.

    ``values`` has shape (n, ...) and any dtype of numbers, ``indices`` shape (n,) and
    an integer dtype; an index may repeat.
    """

    values: Array
    indices: Array
    rows: int | None = None
    """The number of rows of the larger array; None if it is not known."""


def is_dense(counts: Sequence[int], rows: int | None) -> bool:
    """Whether a dense all-reduce is cheaper than gathering the rows.

    ``counts[r]`` is the number of rows that rank r has.

    In an all-gather each of N ranks receives about (N-1)/N of all rows; in an
    all-reduce it sends and receives 2 (N-1)/N of the dense array. So dense is cheaper
    once the ranks together have more than twice ``rows``. The indices are gathered in
    both cases. SparCML (Renggli et al., arXiv:1802.08021) switches in the same way.
    """
    return rows is not None and sum(counts) > 2 * rows


def densified(slices: Slices, rows: int) -> Array:
    """The dense array, shape (rows, ...): repeated rows are summed, missing rows are 0.

    It has the dtype of the values. Raises IndexError for an index outside of
    ``range(rows)``.
    """
    whole = np.zeros((rows, *slices.values.shape[1:]), slices.values.dtype)
    if len(slices.indices) == 0:
        return whole
    if slices.indices.min() < 0 or slices.indices.max() >= rows:
        raise IndexError(
            f"a sparse gradient has an index beyond its variable's {rows} rows"
        )
    order = np.argsort(slices.indices, kind="stable")
    which, starts = np.unique(slices.indices[order], return_index=True)
    whole[which] = np.add.reduceat(slices.values[order], starts, axis=0)
    return whole


def are_distinct(indices: Array) -> bool:
    """Whether no index repeats; ``indices`` are integers of shape (n,)."""
    ordered = np.sort(indices)
    return bool(np.all(ordered[1:] != ordered[:-1]))


def of_rows(whole: Array, indices: Array) -> Slices:
    """The rows of ``whole`` at ``indices``, each once, in ascending order.

    ``whole`` has shape (rows, ...), ``indices`` are integers of shape (n,). The result
    stays sparse, so that an optimizer updates only rows that have a gradient on some
    rank.
    """
    which = np.unique(indices)
    return Slices(whole[which], which, len(whole))
