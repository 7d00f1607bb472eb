"""Combines sparse gradients (``tf.IndexedSlices``, for example of embeddings).

There are two ways. The cost of an all-gather of the rows grows with the number of rows
on all ranks. The cost of an all-reduce of the dense gradient grows with the size of the
variable. The choice depends only on numbers that every rank knows, so all ranks choose
the same way.

On one machine, a gradient has slices for each row of the batch that looks something up,
so the ranks' slices are concatenated. But some indices do not come from rows, such as
the positions 0, 1, 2, ... of a transformer: one machine has one slice for each, and so
has each rank. Then the slices are added up one by one. It makes a difference: Keras's
optimizers square and clip each slice by itself. Pure.
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
    common: bool = False
    """Whether the indices do not come from the rows of the batch, as far as this rank
    can tell; they do if the ranks have different ones: see ``are_common``."""


def is_dense(counts: Sequence[int], rows: int | None) -> bool:
    """Whether a dense all-reduce is cheaper than gathering the rows.

    ``counts[r]`` is the number of rows that rank r has.

    In an all-gather each of N ranks receives about (N-1)/N of all rows; in an
    all-reduce it sends and receives 2 (N-1)/N of the dense array. So dense is cheaper
    once the ranks together have more than twice ``rows``. The indices are gathered in
    both cases. SparCML (Renggli et al., arXiv:1802.08021) switches in the same way.
    """
    return rows is not None and sum(counts) > 2 * rows


def are_common(parts: Sequence[Array]) -> bool:
    """Whether at least two of the ranks have indices, and all of these the same ones.

    ``parts`` are the ranks' indices, integers of shape (n,); n may differ.
    """
    first, *others = [part for part in parts if len(part)] or [np.empty(0)]
    return bool(others) and all(np.array_equal(first, other) for other in others)


def repeat_by_rows(indices: Array, rows: float) -> bool:
    """Whether ``indices`` are a sequence that is repeated once for each of the rows.

    That is so if each row of a batch looks up the same: these are indices that come
    from rows, although they may be equal on all ranks. ``indices`` are integers of
    shape (n,). False if there are fewer than two rows.
    """
    count, rest = divmod(len(indices), max(1, int(rows)))
    if rows < 2 or count == 0 or rest:
        return False
    return np.array_equal(indices[count:], indices[:-count])


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
