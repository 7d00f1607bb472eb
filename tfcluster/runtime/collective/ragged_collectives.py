"""Collectives on arrays whose first dimension may differ between ranks.

MPI calls them allgatherv and alltoallv. Every rank calls them within an exchange of its
group (``Group.exchange``). Results are in rank order.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tfcluster.runtime.collective.rounding import Rounding, is_half_precision
from tfcluster.runtime.collective.transports.base import UFUNCS, Array, ReduceOp
from tfcluster.runtime.collective.transports.hierarchical import HostTransport

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
    each, more = divmod(rows, size)
    return [rank * each + min(rank, more) for rank in range(size + 1)]


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
