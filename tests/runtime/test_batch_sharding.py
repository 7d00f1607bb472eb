"""How a batch is split between the ranks."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tfcluster.runtime.keras.batches.batch_sharding import bounds


@given(st.integers(0, 500), st.integers(1, 40))
def test_parts_follow_each_other_and_are_even(batch: int, size: int) -> None:
    parts = [bounds(batch, rank, size) for rank in range(size)]
    assert parts[0][0] == 0
    assert parts[-1][1] == batch
    assert all(one[1] == two[0] for one, two in pairwise(parts))
    rows = [stop - start for start, stop in parts]
    assert max(rows) - min(rows) <= 1
