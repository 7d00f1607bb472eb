"""Ranks check that they train the same model."""

from __future__ import annotations

import numpy as np
import pytest

from tfcluster.runtime.collective import rank_divergence
from tfcluster.runtime.collective.rank_divergence import (
    Chunk,
    Ending,
    compared_at_end,
    next_chunks,
)


def test_all_of_the_weights_are_looked_at_in_turn() -> None:
    sizes, widths = [3, 0, 600_000, 1, 5], [4, 4, 4, 8, 2]
    seen = [np.zeros(size, int) for size in sizes]
    position = Chunk(0, 0, 0)
    for _ in range(6):
        found = next_chunks(sizes, widths, position)
        position = found.following
        assert found.chunks
        for chunk in found.chunks:
            seen[chunk.place][chunk.start : chunk.stop] += 1
    assert all((counts > 0).all() for counts in seen)


@pytest.mark.parametrize("sizes", [[], [0], [0, 0]])
def test_nothing_to_look_at(sizes: list[int]) -> None:
    assert next_chunks(sizes, [4] * len(sizes), Chunk(3, 1, 2)).chunks == ()


def test_nothing_is_looked_at_twice_at_once() -> None:
    found = next_chunks([2, 3], [4, 4], Chunk(0, 1, 1))
    assert [(c.place, c.start, c.stop) for c in found.chunks] == [
        (0, 1, 2),
        (1, 0, 3),
        (0, 0, 1),
    ]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "bool"])
def test_a_checksum_sees_every_element(dtype: str) -> None:
    array = np.ones(11, dtype)
    whole = rank_divergence.checksum(array)
    for place in range(11):
        other = array.copy()
        other[place] = 0
        assert rank_divergence.checksum(other) != whole
    assert rank_divergence.checksum(array.copy()) == whole


def test_how_far_arrays_are_apart() -> None:
    nan = np.array([np.nan, 2.0])
    assert rank_divergence.distance(nan, nan) == 0
    assert rank_divergence.distance(nan, np.array([1.0, 2.0])) == np.inf
    assert rank_divergence.distance(np.array([1.0, 4.0]), np.array([2.0, 4.0])) == 0.25
    same = np.array([np.inf, 1.0])
    assert rank_divergence.distance(same, same.copy()) == 0


ONE, OTHER = (rank_divergence.summary([np.full(5, value)]) for value in (1.0, 2.0))
NEAR = rank_divergence.summary([np.full(5, 1.0 + 1e-9)])


@pytest.mark.parametrize(
    ("others", "error", "warning"),
    [
        ({}, None, None),
        ({0: {"rate": "0.1", "kernel": ONE}}, None, None),
        ({0: {"something else": "1"}}, None, None),
        ({0: {"rate": "0.2"}}, "the rate is 0.2 on rank 0 and 0.1 on rank 1 at", None),
        ({0: {"kernel": OTHER}}, "kernel differs between rank 1 and rank 0 at", None),
        ({0: {"kernel": NEAR}}, None, "kernel differs between ranks by"),
    ],
)
def test_what_ranks_find_at_the_end(
    others: dict[int, dict[str, str]], error: str | None, warning: str | None
) -> None:
    found = compared_at_end(1, {"rate": "0.1", "kernel": ONE}, others, {"rate": 7})
    assert (found == Ending()) is (error is None and warning is None)
    assert (error or "") in (found.error or "")
    assert (warning or "") in (found.warning or "")
    if error and "rate" in error:
        assert "it was the same in step 7" in (found.error or "")


def test_numbers_that_differ_by_rounding_look_the_same() -> None:
    assert (
        rank_divergence.text_of(np.float32(0.1))
        == rank_divergence.text_of(0.1)
        == "0.1"
    )
    assert rank_divergence.text_of(np.int64(41)) == "41"
    assert rank_divergence.text_of(True) == "1"
