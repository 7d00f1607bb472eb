"""Exchanges of rows: arrays whose first dimension may differ between ranks.

All are called within a turn, on every rank. What arrives keeps the order of the ranks.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from tfcluster.runtime.collective.half_precision import is_half
from tfcluster.runtime.collective.transports.base import (
    UFUNCS,
    Array,
    ReduceOp,
    Transport,
)

_COUNT = struct.Struct(">q")
"""Rows before their bytes: those of a row without columns say nothing."""


def gathered(transport: Transport, array: Array) -> tuple[Array, Array]:
    """The ranks' arrays, one after the other, and how many rows each has (int64)."""
    return _joined(transport.allgather(_packed(array)), array)


def swapped(
    transport: Transport, array: Array, splits: Sequence[int]
) -> tuple[Array, Array]:
    """The next ``splits[r]`` rows go to rank r.

    Returns what the ranks have sent here, and how many rows each has sent (int64).
    """
    ends = np.cumsum([0, *splits])
    parts = [_packed(array[start:end]) for start, end in pairwise(ends)]
    return _joined(transport.alltoall(parts), array)


def reduced_part(transport: Transport, array: Array, op: ReduceOp) -> Array:
    """This rank's rows of the ranks' arrays combined; shapes are equal on all ranks.

    Averages are sums here. Half precision comes back as float32.
    """
    ends = part_bounds(len(array), transport.size)
    parts = [array[start:end].tobytes() for start, end in pairwise(ends)]
    rank = transport.rank
    shape = (ends[rank + 1] - ends[rank], *array.shape[1:])
    ufunc = UFUNCS[ReduceOp.SUM if op is ReduceOp.AVERAGE else op]
    total: Array | None = None
    for data in transport.alltoall(parts):
        part = np.frombuffer(data, array.dtype).reshape(shape)
        if is_half(array.dtype):
            part = part.astype(np.float32)
        total = part if total is None else ufunc(total, part)
    assert total is not None
    return total


def part_bounds(rows: int, size: int) -> list[int]:
    """Where each rank's part of ``rows`` begins, and their end.

    Parts are even; the first ``rows % size`` ranks have one row more.
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
