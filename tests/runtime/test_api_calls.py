"""The collective operations that scripts call, on three ranks and on one."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.kit.ranks import Job, run_jobs

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The results of each rank, by job."""
    jobs = run_jobs(
        tmp_path_factory.mktemp("api"),
        [Job("three", 3, "api_calls.py"), Job("one", 1, "api_calls.py")],
        timeout_s=100,
    )
    lines = {
        name: [
            [line for line in output.splitlines() if line.startswith("{")]
            for output in job.outputs
        ]
        for name, job in jobs.items()
    }
    for name, job in jobs.items():
        assert all(lines[name]), job.outputs
    return {
        name: [json.loads(last) for *_, last in ranks] for name, ranks in lines.items()
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("average", [[2.0, 4.0]]),
        ("sum", [[6.0, 12.0]]),
        ("min", [[1.0, 2.0]]),
        ("max", [[3.0, 6.0]]),
        ("product", [[6.0, 48.0]]),
        ("rows", [[2.0, 4.0], [3.0, 6.0], [3.0, 6.0]]),
        ("broadcast", [[2.0, 4.0]]),
        ("slices", [[4 / 3], [2 / 3]]),
        ("whole average", 2),
        ("variable", 1.0),
        ("bools", [False, True, False]),
        ("initialized", True),
        ("after", False),
    ],
)
def test_all_ranks_get_the_result(
    found: dict[str, list[dict[str, Any]]], name: str, expected: Any
) -> None:
    for rank in found["three"]:
        np.testing.assert_allclose(rank[name], expected, rtol=1e-6)


def test_gathering_along_another_axis(found: dict[str, list[dict[str, Any]]]) -> None:
    row = [1.0, 2.0, 2.0, 2.0, 4.0, 4.0, 3.0, 3.0, 3.0, 6.0, 6.0, 6.0]
    assert all(rank["columns"] == [row] for rank in found["three"])


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float64", "int32", "uint8", "complex64"]
)
def test_dtypes_survive(found: dict[str, list[dict[str, Any]]], dtype: str) -> None:
    for rank in found["three"]:
        assert rank[f"dtype {dtype}"] == [
            [6.0, 12.0],
            [1.0, 2.0],
            [1.0, 2.0, 2.0, 4.0, 3.0, 6.0],
        ]


def test_everyone_knows_who_it_is(found: dict[str, list[dict[str, Any]]]) -> None:
    assert [rank["who"] for rank in found["three"]] == [
        [0, 3, 0, 3, True],
        [1, 3, 1, 3, False],
        [2, 3, 2, 3, False],
    ]
    assert [rank["hosts"] for rank in found["three"]] == [[0, 1]] * 3


def test_what_cannot_be_exchanged_is_refused(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    for rank in found["three"]:
        assert "numbers, not string" in rank["strings"]
        assert "at least one dimension" in rank["scalar"]
        assert "not both" in rank["both"]


def test_a_difference_is_named_on_every_rank(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    for rank in found["three"]:
        assert "allreduce (average) of weights" in rank["mismatch"]
        assert "rank 0, 1: tensor float32 (2)" in rank["mismatch"]
        assert "rank 2: tensor float32 (3)" in rank["mismatch"]


def test_one_rank_is_enough(found: dict[str, list[dict[str, Any]]]) -> None:
    (alone,) = found["one"]
    assert alone["sum"] == alone["average"] == alone["broadcast"] == [[1.0, 2.0]]
    assert alone["rows"] == []
    assert "mismatch" not in alone
