"""The mean of shards does not depend on how the shards are divided among ranks.

The ranks are threads that are connected by real sockets.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.runtime.ranks import as_threads, results
from tfcluster.runtime.collective import Group, Signature
from tfcluster.runtime.collective.shard_sums import mean_of_shards
from tfcluster.runtime.collective.shard_tree import added_up, shard_bounds, subtrees
from tfcluster.runtime.collective.sparse import Slices

SIGNATURE = Signature("test")
SHARDS = 8
LARGE = 70_001
"""More numbers than are added up at a time, in vectors that no rank sends directly."""


@given(st.integers(1, 40), st.data())
def test_the_order_of_additions_depends_on_the_number_of_shards_only(
    shards: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, shards))

    def add(lower: str, upper: str) -> str:
        return f"({lower}+{upper})"

    leaves = {(shard, shard + 1): str(shard) for shard in range(shards)}
    known = {}
    for rank in range(size):
        for node in subtrees(shards, *shard_bounds(shards, rank, size)):
            known[node] = added_up(node, leaves, add)
    assert added_up((0, shards), known, add) == added_up((0, shards), leaves, add)


@given(st.integers(1, 40), st.data())
def test_each_shard_belongs_to_one_rank(shards: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, shards))
    bounds = [shard_bounds(shards, rank, size) for rank in range(size)]
    owned = [shard for first, last in bounds for shard in range(first, last)]
    assert owned == list(range(shards))
    counts = [last - first for first, last in bounds]
    assert max(counts) - min(counts) <= 1 <= min(counts)


def gradients_of(shard: int) -> tuple[list[NDArray[np.generic]], list[Slices]]:
    rng = np.random.default_rng(shard)
    dense: list[NDArray[np.generic]] = [
        rng.normal(size=(3, 5)).astype(np.float32),
        rng.normal(size=LARGE).astype(np.float32),
        rng.normal(size=7),
        rng.normal(size=9).astype(np.float16),
        rng.normal(size=()).astype(np.float32),
    ]
    rows = 1 + shard % 3
    values = rng.normal(size=(rows, 2)).astype(np.float32)
    positions = rng.normal(size=(3, 2)).astype(np.float32)
    return dense, [
        Slices(values, rng.integers(0, 9, rows), 9),
        Slices(positions, np.array([4, 0, 4]), common=True),
    ]


@functools.cache
def mean_on(
    size: int, weights: tuple[float, ...], hosts: str, small: bool = False
) -> list[bytes]:
    """The bytes of the mean, which all ranks must have."""

    def act(group: Group) -> list[bytes]:
        own = range(*shard_bounds(SHARDS, group.rank, size))
        dense, sparse = zip(*map(gradients_of, own), strict=True)
        if small:
            dense = tuple([each[0]] for each in dense)
        means, slices = mean_of_shards(
            group,
            SHARDS,
            dense,
            sparse,
            weights=[weights[shard] for shard in own],
            signature=SIGNATURE,
        )
        found: Sequence[NDArray[np.generic]] = [
            *means,
            *(each.values for each in slices),
            *(each.indices for each in slices),
        ]
        return [array.tobytes() for array in found]

    first, *others = results(as_threads(size, act, list(hosts) if hosts else None))
    assert all(other == first for other in others)
    return first


EQUAL = (4.0,) * SHARDS
UNEQUAL = (3.0, 3.0, 2.0, 3.0, 3.0, 2.0, 3.0, 2.0)


@pytest.mark.parametrize("weights", [EQUAL, UNEQUAL, (1.0,) + (0.0,) * 7])
@pytest.mark.parametrize(
    ("size", "hosts"),
    [(2, ""), (2, "ab"), (3, ""), (3, "aab"), (4, "aabb"), (5, "abcde"), (8, "")],
)
def test_the_mean_has_the_bits_of_one_rank(
    size: int, hosts: str, weights: tuple[float, ...]
) -> None:
    assert mean_on(size, weights, hosts) == mean_on(1, weights, "")
    assert mean_on(size, weights, hosts, small=True) == mean_on(1, weights, "", True)


def test_it_is_the_mean_by_rows() -> None:
    found = np.frombuffer(mean_on(3, UNEQUAL, "")[0], np.float32)
    dense = [gradients_of(shard)[0][0] for shard in range(SHARDS)]
    expected = np.average(np.array(dense), axis=0, weights=UNEQUAL)
    np.testing.assert_allclose(found.reshape(3, 5), expected, rtol=1e-5)


def test_a_shard_without_rows_counts_as_zeros() -> None:
    """It computes a row that does not count, which may yield NaN."""

    def act(group: Group) -> float:
        own = range(*shard_bounds(SHARDS, group.rank, group.size))
        means, _ = mean_of_shards(
            group,
            SHARDS,
            [[np.array([2.0 if shard < 3 else np.nan], np.float32)] for shard in own],
            [[] for _ in own],
            weights=[float(shard < 3) for shard in own],
            signature=SIGNATURE,
        )
        return float(means[0][0])

    assert results(as_threads(2, act)) == [pytest.approx(2.0)] * 2
