"""Sparse gradients (``tf.IndexedSlices``, as of embeddings) as arrays. Pure."""

from __future__ import annotations

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


def are_distinct(indices: Array) -> bool:
    """Whether no index repeats; ``indices`` are integers of shape (n,)."""
    ordered = np.sort(indices)
    return bool(np.all(ordered[1:] != ordered[:-1]))
