"""Arrays of uneven length, made even and cut again. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfcluster.runtime.collective.transports.base import Array


def padded(array: Array, rows: int) -> Array:
    """``array`` with zeros after its rows, so that it has ``rows`` of them.

    It is returned itself where it has so many. Raises ValueError for scalars and where
    there are more.
    """
    if array.ndim == 0:
        raise ValueError("a scalar has no rows")
    missing = rows - len(array)
    if missing < 0:
        raise ValueError(f"{len(array)} rows do not fit into {rows}")
    if missing == 0:
        return array
    return np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])


def unpadded(gathered: Array, rows: Sequence[int]) -> list[Array]:
    """The parts of equally long, padded arrays that were put one after the other.

    ``rows[i]`` is how many the i-th had before. Raises ValueError where ``gathered``
    is no ``len(rows)`` arrays of one length.
    """
    if not rows or len(gathered) % len(rows):
        raise ValueError(f"{len(gathered)} rows are not {len(rows)} equal parts")
    length = len(gathered) // len(rows)
    return [gathered[i * length : i * length + count] for i, count in enumerate(rows)]
