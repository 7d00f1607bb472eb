"""Rows of arrays on the host: those of one rank, and those of all ranks together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfcluster.runtime.collective.transports.hierarchical import HostTransport
from tfcluster.runtime.partition.placement import Shard, Split
from tfcluster.runtime.tensor_types import Array


def gathered(transport: HostTransport, array: Array, shard: Shard) -> Array:
    """The whole array, of which every rank has its rows."""
    parts = transport.allgather(packed(array))
    before, after = array.shape[: shard.dim], array.shape[shard.dim + 1 :]
    if 0 in before or 0 in after:
        return np.zeros((*before, shard.size, *after), array.dtype)
    rows = [unpacked(part, array.dtype) for part in parts]
    return joined([part.reshape((*before, -1, *after)) for part in rows], shard)


def joined(parts: Sequence[Array], shard: Shard) -> Array:
    """The whole array, given the rows of every rank."""
    before, after = parts[0].shape[: shard.dim], parts[0].shape[shard.dim + 1 :]
    blocks = [
        part.reshape(
            (*before, shard.outer, part.shape[shard.dim] // shard.outer, *after)
        )
        for part in parts
    ]
    whole = np.concatenate(blocks, axis=shard.dim + 1)
    return whole.reshape((*before, shard.size, *after))


def rows_of(array: Array, shard: Shard, split: Split) -> Array:
    """A rank's rows of a whole array: a part of its memory, or a copy."""
    before, after = array.shape[: shard.dim], array.shape[shard.dim + 1 :]
    blocks = array.reshape((*before, shard.outer, shard.block, *after))
    first = split.first(shard.rows) * shard.inner
    entries = slice(first, first + split.local_block(shard))
    rows = blocks[(slice(None),) * (shard.dim + 1) + (entries,)]
    return rows.reshape((*before, split.local_size(shard), *after))


def packed(array: Array) -> bytes:
    """The elements; strings after their number and their lengths."""
    if array.dtype != np.object_:
        return np.ascontiguousarray(array).tobytes()
    strings = [bytes(string) for string in array.reshape(-1)]
    sizes = np.array([len(strings), *map(len, strings)], np.int64)
    return b"".join([sizes.tobytes(), *strings])


def unpacked(data: bytes, dtype: np.dtype[Any]) -> Array:
    """The elements, in one dimension."""
    if dtype != np.object_:
        return np.frombuffer(data, dtype)
    count = int(np.frombuffer(data, np.int64, 1)[0])
    sizes = np.frombuffer(data, np.int64, count, 8)
    ends = 8 * (count + 1) + np.cumsum(sizes)
    strings = np.empty(count, np.object_)
    for index, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        strings[index] = bytes(data[end - size : end])
    return strings
