"""Entries for rows go to the ranks that have the rows, and to no others."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kit.ranks import as_threads
from tfcluster.runtime.collective import Group, Signature
from tfcluster.runtime.partition.host_rows import rows_of
from tfcluster.runtime.partition.placement import Shard, Split
from tfcluster.runtime.partition.row_owners import (
    exchanged,
    from_owners,
    ids_to_owners,
    owners_of,
    to_owners,
)
from tfcluster.runtime.tensor_types import Array

ROWS, BATCH, WIDTH = 17, 7, 3
HOMES = {
    "rows": ((BATCH, 4), Shard(0, BATCH)),
    "rows in another dimension": ((4, BATCH), Shard(1, BATCH)),
    "merged": ((2 * BATCH * 3,), Shard(0, BATCH, 2, 3)),
}
"""Shapes of indices, and how they are divided."""


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("size", [2, 3])
def test_owners_get_entries_in_the_order_of_the_whole(
    size: int, home: str, dtype: Any
) -> None:
    shape, shard = HOMES[home]
    random = np.random.default_rng(size)
    ids = random.integers(-2, ROWS + 2, shape).astype(np.int32)
    entries = random.normal(size=(*shape, WIDTH)).astype(dtype)
    table = random.normal(size=(ROWS + 4, WIDTH)).astype(dtype)

    def act(group: Group) -> tuple[Array, Array, Array, int]:
        own = rows_of(ids, shard, Split(group.rank, size))
        mine = rows_of(entries, shard, Split(group.rank, size)).reshape(-1, WIDTH)
        with group.exchange(Signature("lookup")) as call:
            transport, before = call.transport, call.transport.sent_bytes
            trip = ids_to_owners(own, ROWS, shard, size)
            (route,) = exchanged(transport, [trip])
            found = table[route[0] + 2]
            back, there = exchanged(
                transport,
                [
                    from_owners(found, own, route, ROWS, size),
                    to_owners(mine, own.reshape(-1), route, ROWS, size),
                ],
            )
            return route, back, there, transport.sent_bytes - before

    results = as_threads(size, act)
    owners, sent = owners_of(ids, ROWS, size), 0
    for rank, result in enumerate(results):
        assert not isinstance(result, BaseException), result
        route, back, there, bytes_of_rank = result
        split, is_his = Split(rank, size), owners == rank
        first, count = split.first(ROWS), split.count(ROWS)
        of_rank = ids.reshape(-1)[is_his]
        inside = of_rank[(of_rank >= 0) & (of_rank < ROWS)]
        assert ((inside >= first) & (inside < first + count)).all()
        np.testing.assert_array_equal(route[0], of_rank)
        expected = rows_of(table[ids + 2], shard, split)
        assert back.dtype == there.dtype == dtype
        np.testing.assert_array_equal(back.astype(float), expected.astype(float))
        in_order = entries.reshape(-1, WIDTH)[is_his]
        np.testing.assert_array_equal(there.astype(float), in_order.astype(float))
        sent += bytes_of_rank
    # An entry goes once there and a row once back, beside indices and headers.
    assert sent < 2 * entries.nbytes + ids.nbytes + size * size * 200
