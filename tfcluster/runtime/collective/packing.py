"""All-reduce of many arrays within one exchange: small ones are packed first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from tfcluster.runtime.collective.ragged_collectives import reduce_half_precision
from tfcluster.runtime.collective.rounding import is_half_precision
from tfcluster.runtime.collective.transports.base import Array, ReduceOp
from tfcluster.runtime.collective.transports.hierarchical import HostTransport
from tfcluster.runtime.net.buffer_pool import ALIGNMENT, Pool
from tfcluster.runtime.telemetry.tracer import EXCHANGES, Tracer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """An exchange in progress, on whose signature all ranks have agreed."""

    transport: HostTransport
    notes: tuple[bytes, ...] = ()
    """The note that each rank has sent along, in rank order: eight bytes."""
    tracer: Tracer | None = None
    how: str = ""
    """The transport's name, for the tracer."""

    def part(self, nbytes: int, act: Callable[[], T]) -> T:
        """Call ``act``, which transfers ``nbytes`` bytes of a rank: a bucket."""
        tracer = self.tracer
        if tracer is None:
            return act()
        began_s, waited_s = tracer.clock(), self.transport.waited_s
        result = act()
        ended_s, waited_s = tracer.clock(), self.transport.waited_s - waited_s
        tracer.add(EXCHANGES, "bucket", began_s, ended_s, nbytes, self.how, waited_s)
        return result


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
) -> list[Array]:
    """All-reduce the arrays; returns new arrays.

    Small arrays of one dtype are packed into one vector, which is all-reduced piece by
    piece. A large array is all-reduced in a separate call. Results have the shapes and
    dtypes of ``arrays``, which are equal on all ranks. The average of integers is
    rounded down; it does not overflow. Raises what the transport raises.
    """
    if op is not ReduceOp.AVERAGE:
        return _reduced(call, arrays, op)
    size = call.transport.size
    # Sums of narrow integers could overflow; their averages fit the dtype again.
    wide = [
        array.astype(np.uint64 if array.dtype.kind == "u" else np.int64)
        if array.dtype.kind in "iu"
        else array
        for array in arrays
    ]
    means = []
    for array, total in zip(arrays, _reduced(call, wide, op), strict=True):
        if array.dtype.kind in "iu":
            means.append((total // total.dtype.type(size)).astype(array.dtype))
        elif is_half_precision(array.dtype):
            means.append(total)
        else:
            means.append(np.divide(total, total.dtype.type(size), out=total))
    return means


def _reduced(
    call: CollectiveCall, arrays: Sequence[Array], op: ReduceOp
) -> list[Array]:
    """The reductions; for AVERAGE, those in half precision are divided, others sums."""
    divisor = 1
    if op is ReduceOp.AVERAGE:
        op, divisor = ReduceOp.SUM, call.transport.size
    results: list[Array] = [np.empty(0)] * len(arrays)
    alone = [i for i, array in enumerate(arrays) if _goes_alone(array, len(arrays))]
    for i in alone:
        results[i] = _reduced_alone(call, arrays[i], op)
    together = [i for i in range(len(arrays)) if i not in set(alone)]
    for dtype in dict.fromkeys(arrays[i].dtype for i in together):
        chosen = [i for i in together if arrays[i].dtype == dtype]
        vector, bounds = packed([arrays[i] for i in chosen], dtype)
        most = _PIECE_BYTES // dtype.itemsize
        for start in range(0, len(vector), most):
            piece = vector[start : start + most]
            if is_half_precision(dtype):
                reduce = partial(reduce_half_precision, call.transport)
                piece[:] = call.part(piece.nbytes, partial(reduce, piece, op, divisor))
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


def _reduced_alone(call: CollectiveCall, array: Array, op: ReduceOp) -> Array:
    total = pool.empty(array.size, array.dtype)
    act = partial(call.transport.allreduce, total, op, array.reshape(-1))
    call.part(total.nbytes, act)
    return total.reshape(array.shape)


def packed(arrays: Sequence[Array], dtype: Any) -> tuple[Array, list[tuple[int, int]]]:
    """Pack the arrays into one vector; also returns each one's bounds.

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
        vector[start:end] = array.reshape(-1)
        bounds.append((start, end))
    return vector, bounds
