"""Rows of divided tables go to the ranks that need them, and no others do."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.kit.ranks import as_threads
from tfcluster.runtime.collective import Group, Signature
from tfcluster.runtime.partition.host_rows import looked_up, rows_of
from tfcluster.runtime.partition.placement import Shard, Split

BATCH, IDS, WIDTH = 11, 3, 5


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_gets_its_rows(size: int, dtype: Any) -> None:
    random = np.random.default_rng(size)
    whole = random.normal(size=(BATCH, IDS, WIDTH)).astype(dtype)
    whole[1, 2] = np.nan
    whole[3, 1] = 0
    owners = random.integers(0, size, (BATCH, IDS, 1))

    def act(group: Group) -> tuple[Any, int]:
        term = np.where(owners == group.rank, whole, np.zeros((), dtype))
        with group.exchange(Signature("lookup")) as call:
            before = call.transport.sent_bytes
            rows = looked_up(call.transport, term, Shard(0, BATCH))
            return rows, call.transport.sent_bytes - before

    for rank, result in enumerate(as_threads(size, act)):
        assert not isinstance(result, BaseException), result
        rows, _ = result
        expected = rows_of(whole, Shard(0, BATCH), Split(rank, size))
        assert rows.dtype == expected.dtype
        np.testing.assert_array_equal(rows.astype(float), expected.astype(float))
    sent = sum(count for _, count in as_threads(size, act))  # type: ignore[misc]
    # Each vector once at most, beside a bit for each vector and term, and headers.
    assert sent < whole.nbytes + size * size * 100
