"""Pads arrays of different lengths to one length, and removes the padding. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfcluster.runtime.collective.transports.base import Array


def padded(array: Array, rows: int) -> Array:
    """``array`` padded with zeros to ``rows`` rows; unchanged if it has that many.

    Raises ValueError for a scalar, and if the array has more rows.
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
    """Split concatenated padded arrays of equal length, and remove the padding.

    ``rows[i]`` is the unpadded length of the i-th array. Raises ValueError if
    ``gathered`` does not consist of ``len(rows)`` equal parts.
    """
    if not rows or len(gathered) % len(rows):
        raise ValueError(f"{len(gathered)} rows are not {len(rows)} equal parts")
    length = len(gathered) // len(rows)
    return [gathered[i * length : i * length + count] for i, count in enumerate(rows)]
