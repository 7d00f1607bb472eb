"""Compares what one process has trained with what the ranks have trained together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.runtime.keras_jobs import CASES, LIMIT_S, Compared, Values

MARKS = [pytest.mark.tensorflow, pytest.mark.timeout(LIMIT_S + 100)]
"""For every module whose tests use the jobs of ``keras_jobs.py``."""

WEIGHTS, METRICS = 1e-5, 1e-6
"""Tolerances for float32, relative to an array's largest value."""

HALF_PRECISION = ["mixed_bfloat16", "mixed_precision", "overflow", "sum_overflows"]
OTHERS = [
    "checkpoints",
    "files",
    "one_rank_stops",
    "unwritable",
    "without_a_fixed_order",
    "written",
]
STRATEGIES = [
    "experimental_strategies",
    "parameter_servers",
    "strategies_of_clusters",
    "two_replicas",
]
"""Cases that the runtime refuses."""
EQUAL = sorted(CASES.keys() - {*HALF_PRECISION, *OTHERS, *STRATEGIES})


def equal_of(theme: str) -> list[str]:
    return [case for case in EQUAL if CASES[case][0] == theme]


def assert_equal_on_all_ranks(ranks: list[Values]) -> None:
    for other in ranks[1:]:
        assert other.keys() == ranks[0].keys()
        for key, value in ranks[0].items():
            np.testing.assert_array_equal(other[key], value, err_msg=key)


def assert_equal_to_one(
    one: Values, found: Values, *, tolerance: float | None = None
) -> None:
    """Check that weights and metrics equal those of one process up to rounding."""
    assert found.keys() == one.keys()
    for key, value in one.items():
        if value.dtype.kind not in "fiu":
            np.testing.assert_array_equal(found[key], value, err_msg=key)
            continue
        limit = tolerance or (METRICS if is_metric(key) else WEIGHTS)
        largest = np.abs(value).max() if value.size else 0.0
        np.testing.assert_allclose(
            found[key], value, rtol=0, atol=limit * largest + 1e-12, err_msg=key
        )


def is_metric(key: str) -> bool:
    return "history" in key or "evaluate" in key


def compare(compared: Compared, **kwargs: Any) -> None:
    assert_equal_on_all_ranks(compared.ranks)
    assert_equal_to_one(compared.one, compared.ranks[0], **kwargs)


def assert_refused(ranks: list[Values], text: str) -> None:
    for found in ranks:
        assert str(found["raised"]).startswith("CollectiveError: ")
        assert text in str(found["raised"])
