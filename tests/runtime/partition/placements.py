"""Placements: pure arithmetic."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tfcluster.runtime.partition.placement import (
    REPLICATE,
    SUM,
    ListOf,
    Partial,
    Placement,
    Shard,
    Split,
    is_whole,
    joined,
)

sizes = st.integers(1, 4)
many = settings(max_examples=200, deadline=None)


def _rows_of(shape: tuple[int, ...], shard: Shard) -> np.ndarray:
    """The row to which each element of a tensor belongs."""
    along = np.arange(shard.size) // shard.inner % shard.rows
    found = along.reshape([-1 if dim == shard.dim else 1 for dim in range(len(shape))])
    return np.broadcast_to(found, shape)


@given(st.lists(sizes, max_size=3), st.data(), sizes, sizes, st.integers(2, 7))
@many
def test_reshaped_elements_stay_with_their_rows(
    others: list[int], data: st.DataObject, outer: int, inner: int, rows: int
) -> None:
    dim = data.draw(st.integers(0, len(others)))
    shard = Shard(dim, rows, outer, inner)
    shape = (*others[:dim], shard.size, *others[dim:])
    new = tuple(data.draw(st.permutations(shape)))
    if data.draw(st.booleans()):
        cut = data.draw(st.integers(0, len(shape)))
        new = tuple(
            size
            for size in (math.prod(shape[:cut]), math.prod(shape[cut:]))
            if size != 1
        )
    target = shard.reshaped(shape, new)
    whole = _rows_of(shape, shard).reshape(new)
    if target is not None:
        assert target.fits(new)
        np.testing.assert_array_equal(_rows_of(new, target), whole)
        return
    # There is no such placement then.
    for place, size in enumerate(new):
        for factor in range(1, size + 1):
            other = Shard(place, rows, factor, size // (factor * rows) or 1)
            if other.size == size:
                assert not np.array_equal(_rows_of(new, other), whole)


@given(st.lists(st.sampled_from([0, 1, 2]), min_size=1, max_size=3))
def test_nothing_is_divided_without_elements(shape: list[int]) -> None:
    old = (5, *shape)
    for new in ((5 * math.prod(shape),), (math.prod(shape), 5), tuple(reversed(old))):
        target = Shard(0, 5).reshaped(old, new)
        assert target is None or target.size > 0
    assert not Shard(0, 5, 0, 1).fits((0,))


@given(st.integers(1, 5), st.integers(5, 12), sizes, sizes)
def test_parts_are_the_whole(size: int, rows: int, outer: int, inner: int) -> None:
    shard = Shard(0, rows, outer, inner)
    splits = [Split(rank, size) for rank in range(size)]
    assert sum(split.count(rows) for split in splits) == rows
    assert [split.first(rows) for split in splits] == list(
        itertools.accumulate((s.count(rows) for s in splits[:-1]), initial=0)
    )
    assert all(split.count(rows) for split in splits)
    assert sum(split.local_size(shard) for split in splits) == shard.size
    assert splits[0].local_shape((shard.size, None), shard)[1] is None


PLACEMENTS: list[Placement] = [
    *(REPLICATE, Shard(0, 4), Shard(1, 4), Shard(0, 4, 2, 1), SUM, Partial("max")),
    *(
        ListOf(None),
        ListOf(REPLICATE),
        ListOf(Shard(0, 4)),
        ListOf(Shard(1, 4)),
    ),
]


@given(st.sampled_from(PLACEMENTS), st.sampled_from(PLACEMENTS))
@many
def test_joined_placements(first: Placement, second: Placement) -> None:
    found, final = joined(first, second)
    other, _ = joined(second, first)
    assert found == other
    assert joined(first, first) == (first, False)
    # What is not final comes to rest.
    again, _ = joined(found, second)
    assert final or again == found
    assert not final or is_whole(found)


@given(st.lists(st.sampled_from(PLACEMENTS[:6]), min_size=1, max_size=6))
@many
def test_joined_in_any_order_becomes_whole_or_stays(
    placements: list[Placement],
) -> None:
    current, final = placements[0], False
    for each in placements * 2:
        if not final:
            current, final = joined(current, each)
    divided = {each for each in placements if each != REPLICATE}
    assert current == REPLICATE or current in divided
