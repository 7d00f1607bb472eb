"""All-reduce of many arrays within one exchange: small ones are packed first.

Here are also collectives on arrays whose first dimension may differ between ranks; MPI
calls them allgatherv and alltoallv. Every rank calls them within an exchange of its
group (``Group.exchange``). Results are in rank order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from tfcluster.runtime.collective.rounding import Rounding, is_half_precision
from tfcluster.runtime.collective.transports.base import (
    UFUNCS,
    Array,
    ReduceOp,
    flat_bytes,
)
from tfcluster.runtime.collective.transports.hierarchical import (
    DIRECT_BYTES,
    HostTransport,
)
from tfcluster.runtime.net.buffer_pool import ALIGNMENT, Pool
from tfcluster.runtime.telemetry.tracer import EXCHANGES, Tracer

_COUNT = struct.Struct(">q")
"""The row count, sent before the bytes: rows without columns have no bytes to count."""


def allgatherv(transport: HostTransport, array: Array) -> tuple[Array, Array]:
    """All-gather: the ranks' arrays concatenated, and each rank's row count.

    ``array`` has shape (rows, ...); dtype and other dimensions are equal on all ranks,
    and the result has the same. The counts are int64 of shape (ranks,). This is
    MPI_Allgatherv. Raises what ``HostTransport.allgather`` raises.
    """
    return _joined(transport.allgather(_packed(array)), array)


def alltoallv(
    transport: HostTransport, array: Array, splits: Sequence[int]
) -> tuple[Array, Array]:
    """All-to-all: the first ``splits[0]`` rows go to rank 0, the next to rank 1, etc.

    ``array`` has shape (rows, ...); dtype and other dimensions are equal on all ranks.
    ``splits`` has a number for each rank; rows beyond their sum are not sent. Returns
    the rows received here, concatenated in rank order, and each rank's row count: int64
    of shape (ranks,). This is MPI_Alltoallv. Raises what the transport raises.
    """
    ends = np.cumsum([0, *splits])
    parts = [_packed(array[start:end]) for start, end in pairwise(ends)]
    return _joined(transport.alltoall(parts), array)


def reduce_scatter(transport: HostTransport, array: Array, op: ReduceOp) -> Array:
    """Reduce-scatter: this rank's part (``part_bounds``) of the reduced array.

    ``array`` has shape (rows, ...), equal on all ranks like the dtype; the result has
    this rank's rows, a new array. AVERAGE returns the sum, which the caller has to
    divide. float16 and bfloat16 are summed in, and returned as, float32; integers wrap
    around. Every rank sends and receives (N-1)/N of the array, by direct exchange:
    Thakur et al., "Optimization of Collective Communication Operations in MPICH", 2005.
    Raises what ``HostTransport.alltoall`` raises.
    """
    ends = part_bounds(len(array), transport.size)
    parts = [array[start:end].tobytes() for start, end in pairwise(ends)]
    rank, half = transport.rank, is_half_precision(array.dtype)
    shape = (ends[rank + 1] - ends[rank], *array.shape[1:])
    ufunc = UFUNCS[ReduceOp.SUM if op is ReduceOp.AVERAGE else op]
    rounding = Rounding(array.dtype.name)
    total: Array | None = None
    for data in transport.alltoall(parts):
        part = np.frombuffer(data, np.uint16 if half else array.dtype)
        if half:
            wide = np.empty(len(part), np.float32)
            rounding.to_float(part.view(array.dtype), wide)
            part = wide
        total = part if total is None else ufunc(total, part)
    assert total is not None
    return total.reshape(shape)


def reduce_half_precision(
    transport: HostTransport, vector: Array, op: ReduceOp, divisor: int = 1
) -> Array:
    """All-reduce a float16 or bfloat16 vector, of equal length on all ranks.

    ``vector`` has shape (n,). ``op`` is one of ``UFUNCS``. The sums are in float32;
    they are divided by ``divisor``, and rounded once. Returns a new vector of the same
    length and dtype; values out of range become infinite. Raises what the transport
    raises. The algorithm is Rabenseifner's (Thakur et al., as above), by direct
    exchange: every rank sends 2 (N-1)/N of the vector, as in a ring.
    """
    total = reduce_scatter(transport, vector, op)
    if divisor != 1:
        total = total / np.float32(divisor)
    rounding = Rounding(vector.dtype.name)
    rounded = rounding.empty(len(total))
    # A value out of range becomes infinite, as in TensorFlow.
    with np.errstate(over="ignore"):
        rounding.to_half(total, rounded)
    parts = transport.allgather(rounded.view(np.uint16).tobytes())
    return np.frombuffer(b"".join(parts), np.uint16).view(vector.dtype)


def part_bounds(rows: int, size: int) -> list[int]:
    """The ``size + 1`` bounds of the ranks' parts of ``rows``.

    Parts are even; each of the first ``rows % size`` ranks has one row more.
    """
    rows_each, more = divmod(rows, size)
    return [rank * rows_each + min(rank, more) for rank in range(size + 1)]


def _packed(array: Array) -> bytes:
    return _COUNT.pack(len(array)) + array.tobytes()


def _joined(parts: Sequence[bytes], like: Array) -> tuple[Array, Array]:
    row = like.shape[1:]
    counts = [_COUNT.unpack_from(part)[0] for part in parts]
    arrays = [
        np.frombuffer(part, like.dtype, offset=_COUNT.size).reshape(count, *row)
        for part, count in zip(parts, counts, strict=True)
    ]
    return np.concatenate(arrays), np.array(counts, np.int64)


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
    data: tuple[memoryview, ...] = ()
    """The data that each rank has sent along, in rank order."""

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


class SmallReduction:
    """The reduction of small arrays, which ranks send with an exchange's header.

    So the ranks wait for each other once, instead of once for the headers and once more
    for the arrays. ``kinds`` has the dtype and the operation of each array: any of
    ``UFUNCS``, and numbers, but not in half precision.
    """

    def __init__(self, kinds: Sequence[tuple[np.dtype[Any], ReduceOp]]) -> None:
        self._count = len(kinds)
        self._places = {
            kind: [i for i, other in enumerate(kinds) if other == kind]
            for kind in dict.fromkeys(kinds)
        }

    @classmethod
    def of(
        cls, kinds: Sequence[tuple[np.dtype[Any], ReduceOp]], sizes: Sequence[int]
    ) -> SmallReduction | None:
        """None if arrays of these sizes (numbers of elements) go another way."""
        dtypes = [dtype for dtype, _ in kinds]
        if any(map(is_half_precision, dtypes)):
            return None
        pairs = zip(dtypes, sizes, strict=True)
        nbytes = sum(dtype.itemsize * size for dtype, size in pairs)
        return cls(kinds) if 0 < nbytes <= DIRECT_BYTES else None

    def packed(self, arrays: Sequence[Array]) -> bytes:
        """What this rank sends: ``data`` of ``Group.exchange``."""
        chosen = [arrays[i] for places in self._places.values() for i in places]
        return flat_bytes(chosen)

    def results(self, call: CollectiveCall, arrays: Sequence[Array]) -> list[Array]:
        """New arrays of the same shapes and dtypes, bitwise equal on all ranks."""
        results: list[Array] = [np.empty(0)] * self._count
        start = 0
        for (dtype, op), places in self._places.items():
            count = sum(arrays[i].size for i in places)
            vectors = [np.frombuffer(data, dtype, count, start) for data in call.data]
            start += count * dtype.itemsize
            total = call.transport.reduced(vectors, UFUNCS[op])
            end = 0
            for i in places:
                begin, end = end, end + arrays[i].size
                results[i] = total[begin:end].reshape(arrays[i].shape)
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
