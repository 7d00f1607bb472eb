"""Ranks check that they train the same model."""

from __future__ import annotations

import numpy as np
import pytest

from tfcluster.runtime.collective import rank_divergence
from tfcluster.runtime.collective.rank_divergence import (
    RankEnding,
    compared_at_end,
)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "bool"])
def test_a_checksum_sees_every_element(dtype: str) -> None:
    array = np.ones(11, dtype)
    whole = rank_divergence.checksum(array)
    for place in range(11):
        other = array.copy()
        other[place] = 0
        assert rank_divergence.checksum(other) != whole
    assert rank_divergence.checksum(array.copy()) == whole


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
    assert (found == RankEnding()) is (error is None and warning is None)
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
