"""Ranks do not copy a large matrix for the gradient of a few rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.ranks import Job, Jobs

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What the program says of its gradients, by the number of ranks."""
    folder: Path = tmp_path_factory.mktemp("matmul-gradient")
    sizes = (1, 2)
    jobs = Jobs(
        folder,
        [Job(str(size), size, "matmul_gradient.py") for size in sizes],
        timeout_s=100,
        must_succeed=True,
    )
    said = {size: jobs[str(size)].outputs[0].splitlines() for size in sizes}
    return {
        size: json.loads(next(line for line in lines if line.startswith("{")))
        for size, lines in said.items()
    }


def test_two_ranks_copy_only_for_many_rows(found: dict[int, Any]) -> None:
    assert {name: each["copies"] for name, each in found[2].items()} == {
        "few": 0,
        "many": 2,
        "unknown": 0,
    }
    assert found[2]["unknown"]["conditionals"]
    assert not found[2]["few"]["conditionals"]


def test_one_process_copies(found: dict[int, Any]) -> None:
    assert all(each["copies"] for each in found[1].values())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("rows", ["few", "many", "unknown"])
def test_the_gradients_are_right(found: dict[int, Any], size: int, rows: str) -> None:
    assert found[size][rows]["largest_error"] < 2e-6
