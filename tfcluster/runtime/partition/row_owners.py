"""Entries that go to the ranks that have the rows which they are for, and back.

There is an entry for each index of a row of a divided variable: the index itself, the
row that it names, or what is to be added to that row. A rank that gets entries of
others has them in the order of the whole tensor. So it adds up those for one row as one
machine does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tfcluster.runtime.collective.transports.hierarchical import HostTransport
from tfcluster.runtime.partition.placement import Shard, Split
from tfcluster.runtime.tensor_types import Array


@dataclass(frozen=True, slots=True)
class Trip:
    """What a rank sends to each rank, and what it makes of what it gets from each."""

    sent: Sequence[bytes]
    received: Callable[[Sequence[bytes]], Array]


def exchanged(transport: HostTransport, trips: Sequence[Trip]) -> list[Array]:
    """What the rank makes of what it gets: all ranks make the same trips at once."""
    parts = []
    for of_rank in zip(*(trip.sent for trip in trips), strict=True):
        ends = np.cumsum([0, *map(len, of_rank)], dtype=np.int64)
        parts.append(b"".join([ends.tobytes(), *of_rank]))
    received: list[list[bytes]] = [[] for _ in trips]
    start = 8 * (len(trips) + 1)
    for data in transport.alltoall(parts):
        ends = np.frombuffer(data, np.int64, len(trips) + 1) + start
        for of_trip, (first, end) in zip(received, pairwise(ends), strict=True):
            of_trip.append(data[first:end])
    pairs = zip(trips, received, strict=True)
    return [trip.received(of_trip) for trip, of_trip in pairs]


def ids_to_owners(ids: Array, rows: int, home: Shard, size: int) -> Trip:
    """The indices of a rank's rows, and for each the rank that has it: shape (2, n).

    ``ids`` is the rank's part, by ``home``, of a tensor of indices.
    """
    owners = owners_of(ids, rows, size)
    # The whole tensor is a row of blocks, of each of which every rank has a part.
    blocks = math.prod(ids.shape[: home.dim]) * home.outer
    block_of = np.repeat(np.arange(blocks), ids.size // max(blocks, 1))

    def sent_to(rank: int) -> bytes:
        is_his = owners == rank
        counts = np.bincount(block_of[is_his], minlength=blocks).astype(np.int64)
        return counts.tobytes() + ids.reshape(-1)[is_his].tobytes()

    def received(parts: Sequence[bytes]) -> Array:
        counts = [np.frombuffer(data, np.int64, blocks) for data in parts]
        found = [np.frombuffer(data[8 * blocks :], ids.dtype) for data in parts]
        block_of = [np.repeat(np.arange(blocks), of_rank) for of_rank in counts]
        order = np.argsort(np.concatenate(block_of), kind="stable")
        ranks = np.repeat(np.arange(size, dtype=ids.dtype), list(map(len, found)))
        return np.stack([np.concatenate(found), ranks])[:, order]

    return Trip([sent_to(rank) for rank in range(size)], received)


def to_owners(entries: Array, ids: Array, route: Array, rows: int, size: int) -> Trip:
    """All ranks' entries for a rank's rows: this one has ``entries`` for its ``ids``.

    ``ids`` has one dimension, and ``route`` is the result of ``ids_to_owners``.
    """
    owners = owners_of(ids, rows, size)

    def received(parts: Sequence[bytes]) -> Array:
        result = np.empty((route.shape[1], *entries.shape[1:]), entries.dtype)
        for rank, data in enumerate(parts):
            result[route[1] == rank] = _entries(data, entries)
        return result

    return Trip([entries[owners == rank].tobytes() for rank in range(size)], received)


def from_owners(found: Array, ids: Array, route: Array, rows: int, size: int) -> Trip:
    """The rows that a rank's ``ids`` name.

    ``found`` are those that it has looked up for all ranks, by its ``route``. A row is
    sent once to each rank that needs it.
    """
    owners = owners_of(ids, rows, size)

    def sent_to(rank: int) -> bytes:
        places = np.flatnonzero(route[1] == rank)
        _, first = np.unique(route[0][places], return_index=True)
        return found[places[first]].tobytes()

    def received(parts: Sequence[bytes]) -> Array:
        result = np.empty((ids.size, *found.shape[1:]), found.dtype)
        for rank, data in enumerate(parts):
            places = np.flatnonzero(owners == rank)
            _, which = np.unique(ids.reshape(-1)[places], return_inverse=True)
            result[places] = _entries(data, found)[which]
        return result.reshape(*ids.shape, *found.shape[1:])

    return Trip([sent_to(rank) for rank in range(size)], received)


def owners_of(ids: Array, rows: int, size: int) -> Array:
    """The rank that has each row, in one dimension.

    An index that no rank has belongs to the first rank or the last, whose op reports
    it.
    """
    firsts = [Split(rank, size).first(rows) for rank in range(1, size)]
    return np.searchsorted(firsts, ids.reshape(-1), side="right")


def _entries(data: bytes, like: Array) -> Array:
    shape = like.shape[1:]
    count = len(data) // max(math.prod(shape) * like.itemsize, 1)
    return np.frombuffer(data, like.dtype).reshape(count, *shape)
