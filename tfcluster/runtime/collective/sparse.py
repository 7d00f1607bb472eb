"""Some rows of large arrays, as gradients of embeddings are: how to combine them. Pure.

Rows can be gathered, which costs as much as there are on all ranks; or they are added
up into whole arrays, which costs as much as the arrays are large. What is cheaper is
decided by what all ranks know, so that all decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tfcluster.runtime.collective.transports.base import Array


@dataclass(frozen=True, slots=True)
class Slices:
    """Some rows of a larger array: ``values[i]`` belongs to row ``indices[i]``."""

    values: Array
    indices: Array
    rows: int | None = None
    """How many rows the larger array has; None: that is not known."""


def is_dense(counts: Sequence[int], rows: int | None) -> bool:
    """Whether whole arrays of ``rows`` are cheaper than ``counts[r]`` rows of rank r.

    Each of N ranks takes in about (N-1)/N of all gathered rows, and sends and takes in
    2 (N-1)/N of an array that is reduced: so it is, once there are more than twice as
    many rows as the array has. Indices are gathered in any case.
    """
    return rows is not None and sum(counts) > 2 * rows


def densified(slices: Slices, rows: int) -> Array:
    """The whole array: rows that come more than once are added up, others are zero.

    Raises IndexError for a row that is not there.
    """
    whole = np.zeros((rows, *slices.values.shape[1:]), slices.values.dtype)
    if len(slices.indices) == 0:
        return whole
    if slices.indices.min() < 0 or slices.indices.max() >= rows:
        raise IndexError(f"a gradient has rows beyond the {rows} of its variable")
    order = np.argsort(slices.indices, kind="stable")
    which, starts = np.unique(slices.indices[order], return_index=True)
    whole[which] = np.add.reduceat(slices.values[order], starts, axis=0)
    return whole


def are_distinct(indices: Array) -> bool:
    """Whether no row comes twice."""
    ordered = np.sort(indices)
    return bool(np.all(ordered[1:] != ordered[:-1]))


def of_rows(whole: Array, indices: Array) -> Slices:
    """Those rows of an array that ``indices`` name, each once, in order.

    So an optimizer touches the rows that it would have touched without the others'.
    """
    which = np.unique(indices)
    return Slices(whole[which], which, len(whole))
