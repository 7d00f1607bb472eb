"""The sum of shards does not depend on how the shards are divided among ranks.

The ranks are threads that are connected by real sockets.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.kit.ranks import as_threads, results
from tfcluster.runtime.collective import Group, ReduceOp, Signature
from tfcluster.runtime.collective.shard_sums import (
    added_up,
    reduced_in_order,
    shard_bounds,
    subtrees,
)
from tfcluster.runtime.collective.transports.base import UFUNCS

Arrays: TypeAlias = list[NDArray[Any]]

SIGNATURE = Signature("test")
SHARDS = 8
LARGE = 70_001
"""So many numbers that ranks do not send them to all others directly."""


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


def terms_of(shard: int, *, small: bool) -> list[NDArray[Any]]:
    rng = np.random.default_rng(shard)
    return [
        rng.normal(size=(3, 5)).astype(np.float32),
        rng.normal(size=7 if small else LARGE).astype(np.float32),
        rng.normal(size=7),
        rng.normal(size=()).astype(np.float32),
        rng.normal(size=(0, 2)),
        rng.integers(-100, 100, 6),
    ]


@functools.cache
def reduced_on(size: int, op: ReduceOp, hosts: str, *, small: bool) -> list[bytes]:
    """The bytes of the results, which all ranks must have."""

    def act(group: Group) -> list[bytes]:
        first, last = shard_bounds(SHARDS, group.rank, size)
        leaves = {
            (shard, shard + 1): terms_of(shard, small=small)
            for shard in range(first, last)
        }

        def combined(lower: Arrays, upper: Arrays) -> Arrays:
            return list(map(UFUNCS[op], lower, upper))

        nodes = [
            added_up(node, leaves, combined) for node in subtrees(SHARDS, first, last)
        ]
        terms = [list(each) for each in zip(*nodes, strict=True)]
        with group.exchange(SIGNATURE) as call:
            found = reduced_in_order(call, terms, op, SHARDS)
        assert [a.shape for a in found] == [each[0].shape for each in terms]
        return [array.tobytes() for array in found]

    first, *others = results(as_threads(size, act, list(hosts) if hosts else None))
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN])
@pytest.mark.parametrize(
    ("size", "hosts"),
    [(2, ""), (2, "ab"), (3, ""), (3, "aab"), (4, "aabb"), (5, "abcde"), (8, "")],
)
def test_the_result_has_the_bits_of_one_rank(
    size: int, hosts: str, op: ReduceOp
) -> None:
    for small in (True, False):
        alone = reduced_on(1, op, "", small=small)
        assert reduced_on(size, op, hosts, small=small) == alone


def test_it_is_the_sum() -> None:
    found = reduced_on(3, ReduceOp.SUM, "", small=True)[0]
    expected = sum(terms_of(shard, small=True)[0] for shard in range(SHARDS))
    np.testing.assert_allclose(
        np.frombuffer(found, np.float32).reshape(3, 5), expected, rtol=1e-5
    )
