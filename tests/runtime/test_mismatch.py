"""Ranks that call different operations all get the same error, in every API."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from tests.kit.ranks import Job, Jobs, Ranks
from tests.kit.time_limits import allow_s

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]

SIZES = [2, 3]
EACH_SIZE = pytest.mark.parametrize(
    "size", [2, pytest.param(3, marks=pytest.mark.slow)]
)
FITS = ["model", "evaluate", "more"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ranks]:
    jobs = [Job(f"calls {size}", size, "differing.py") for size in SIZES]
    jobs += [
        Job(f"{what} {size}", size, "differing_fit.py", (what,))
        for size in SIZES
        for what in FITS
    ]
    return Jobs(tmp_path_factory.mktemp("mismatch"), jobs, timeout_s=110)


def _calls(jobs: Mapping[str, Ranks], size: int) -> list[dict[str, Any]]:
    job = jobs[f"calls {size}"]
    assert job.exit_codes == [0] * size, job.outputs
    return [json.loads(output.splitlines()[-1]) for output in job.outputs]


@EACH_SIZE
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(
    ("case", "usual", "odd"),
    [
        ("shape", "tensor float32 (2)", "tensor float32 (3)"),
        ("dtype", "tensor float32 (2)", "tensor float64 (2)"),
        ("reduction", "allreduce (sum)", "allreduce (max)"),
        ("root", "broadcast from rank 0", "broadcast from rank 1"),
        ("rows", "rows of float32 (4)", "rows of float32 (5)"),
        ("operation", "allgather", "allreduce (average)"),
        ("name", "allreduce (average) of a", "allreduce (average) of b"),
        ("barrier", "barrier", "allreduce (average)"),
    ],
)
def test_a_difference_is_the_same_error_on_every_rank(
    jobs: Mapping[str, Ranks], size: int, mode: str, case: str, usual: str, odd: str
) -> None:
    if case == "barrier" and mode == "graph":
        mode = "eager"
    found = [rank[f"{case} {mode}"] for rank in _calls(jobs, size)]
    assert {rank["type"] for rank in found} == {"CollectiveMismatchError"}, found
    assert len({rank["text"] for rank in found}) == 1
    assert max(rank["seconds"] for rank in found) < allow_s(10)
    others = ", ".join(map(str, range(size - 1)))
    assert f"rank {others}: {usual}" in found[0]["text"]
    assert f"rank {size - 1}: {odd}" in found[0]["text"]


@EACH_SIZE
def test_a_different_model_is_an_error_on_every_rank(
    jobs: Mapping[str, Ranks], size: int
) -> None:
    job = jobs[f"model {size}"]
    assert 0 not in job.exit_codes
    for output in job.outputs:
        assert "CollectiveMismatchError" in output
        assert "last/kernel float32 (4, 2)" in output
        assert f"rank {size - 1}: " in output
        assert "last/kernel float32 (4, 3)" in output


@EACH_SIZE
def test_another_call_of_keras_is_an_error_on_every_rank(
    jobs: Mapping[str, Ranks], size: int
) -> None:
    job = jobs[f"evaluate {size}"]
    assert 0 not in job.exit_codes
    assert all("CollectiveMismatchError" in output for output in job.outputs)


@EACH_SIZE
def test_one_training_more_does_not_hang(jobs: Mapping[str, Ranks], size: int) -> None:
    job = jobs[f"more {size}"]
    assert job.exit_codes[:-1] == [0] * (size - 1), job.outputs
    assert job.exit_codes[-1] == 1
    last = job.outputs[-1]
    assert re.search(r"rank [01] ended its program after step 3, while rank", last)
