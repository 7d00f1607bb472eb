"""All-reduce of many arrays within one exchange: small ones are packed first."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from tfcluster.runtime.collective.collective_call import CollectiveCall
from tfcluster.runtime.collective.half_precision import (
    is_half_precision,
    reduce_half_precision,
)
from tfcluster.runtime.collective.transports.base import Array, ReduceOp
from tfcluster.runtime.net.buffer_pool import ALIGNMENT, Pool

_PIECE_BYTES = 25 << 20
"""The most bytes of a packed vector that are reduced at once."""
ALONE_BYTES = 1 << 22
"""A larger array is not packed: that would only add a copy."""
pool = Pool()
"""The memory of results; reused once nothing refers to it."""


def reduced(
    call: CollectiveCall,
    arrays: Sequence[Array],
    op: ReduceOp,
    *,
    scale: float = 1.0,
) -> list[Array]:
    """All-reduce ``scale`` times the arrays; returns new arrays.

    Small arrays of one dtype are packed into one vector, which is all-reduced piece by
    piece. A large array is all-reduced in a separate call. Results have the shapes and
    dtypes of ``arrays``, which are equal on all ranks. Raises what the methods of
    ``Transport`` raise.
    """
    results: list[Array] = [np.empty(0)] * len(arrays)
    alone = [i for i, array in enumerate(arrays) if _goes_alone(array, len(arrays))]
    for i in alone:
        results[i] = _reduced_alone(call, arrays[i], op, scale)
    together = [i for i in range(len(arrays)) if i not in set(alone)]
    for dtype in dict.fromkeys(arrays[i].dtype for i in together):
        chosen = [i for i in together if arrays[i].dtype == dtype]
        half = is_half_precision(dtype)
        vector, bounds = packed(
            [arrays[i] for i in chosen], dtype, 1.0 if half else scale
        )
        most = _PIECE_BYTES // dtype.itemsize
        for start in range(0, len(vector), most):
            piece = vector[start : start + most]
            if half:
                # Scaled after the conversion to float32, not in half precision.
                shares = None if scale == 1.0 else call.shares
                reduce = partial(reduce_half_precision, call.transport)
                piece[:] = call.part(piece.nbytes, partial(reduce, piece, op, shares))
            else:
                act = partial(call.transport.allreduce, piece, op)
                call.part(piece.nbytes, act)
        for i, (start, end) in zip(chosen, bounds, strict=True):
            results[i] = vector[start:end].reshape(arrays[i].shape)
    return results


def _goes_alone(array: Array, count: int) -> bool:
    """Whether to reduce this array in a separate call, without packing it.

    That saves a copy, which for small arrays costs less than another call. All ranks
    decide the same, because they have compared dtypes and shapes.
    """
    large = array.nbytes > ALONE_BYTES or (count == 1 and array.size > 0)
    return large and not is_half_precision(array.dtype)


def _reduced_alone(
    call: CollectiveCall, array: Array, op: ReduceOp, scale: float
) -> Array:
    total = pool.empty(array.size, array.dtype)
    source = array.reshape(-1)
    if scale == 0.0:
        source, scale = np.zeros_like(source), 1.0  # Not 0 * x: it may be NaN.
    act = partial(call.transport.allreduce, total, op, source, scale)
    call.part(total.nbytes, act)
    return total.reshape(array.shape)


def packed(
    arrays: Sequence[Array], dtype: Any, scale: float = 1.0
) -> tuple[Array, list[tuple[int, int]]]:
    """Pack ``scale`` times the arrays into one vector; also returns each one's bounds.

    The vector is not shared: its parts become the results and may outlive this call.
    Each part is aligned, so that TensorFlow can use it without a copy; the gaps are 0.
    """
    step = max(1, ALIGNMENT // dtype.itemsize)
    starts, length = [], 0
    for array in arrays:
        starts.append(length)
        length += -(-array.size // step) * step
    vector = pool.empty(starts[-1] + arrays[-1].size, dtype)
    bounds = []
    end = 0
    for array, start in zip(arrays, starts, strict=True):
        vector[end:start] = 0
        end = start + array.size
        part = vector[start:end]
        if scale == 0.0:
            part[:] = 0  # Not 0 * x: it may be NaN.
        elif scale == 1.0:
            part[:] = array.reshape(-1)
        else:
            np.multiply(array.reshape(-1), dtype.type(scale), out=part)
        bounds.append((start, end))
    return vector, bounds
