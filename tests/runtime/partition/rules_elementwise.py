"""Rules of ops that compute each element from the elements at its place."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime.partition.simulated import SIZES, divide
from tfcluster.runtime.partition.placement import REPLICATE, Placement, Shard

sizes = st.sampled_from(SIZES)
seeds = st.integers(0, 2**31)


@given(sizes, seeds, st.integers(5, 9), st.integers(1, 3), st.booleans())
@settings(max_examples=20, deadline=None)
def test_both_inputs_are_divided_alike(
    size: int, seed: int, rows: int, columns: int, broadcast: bool
) -> None:
    generator = np.random.default_rng(seed)
    first = generator.normal(size=(rows, columns)).astype("float32")
    second = generator.normal(size=(columns,) if broadcast else (rows, columns))
    placements: list[Placement] = [
        Shard(0, rows),
        REPLICATE if broadcast else Shard(0, rows),
    ]
    found = divide(
        lambda a, b: tf.raw_ops.SquaredDifference(x=a, y=b),
        [first, second.astype("float32")],
        placements,
        size,
    )
    assert found.outputs == [Shard(0, rows)]
    assert not found.computed_whole
    found.assert_equal()
