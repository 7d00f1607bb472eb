"""Horovod's API beyond the operations, under Horovod's own names."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping

import pytest

from tests.kit.ranks import PROGRAMS, Job, Jobs, Ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

SCRIPT = "api_horovod.py"
SIZES = (1, 2, 3)
IN_DEFAULT_TIER = 2
CHECKS = [
    node.name.removeprefix("check_")
    for node in ast.parse((PROGRAMS / SCRIPT).read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ranks]:
    jobs = [Job(str(size), size, SCRIPT) for size in SIZES]
    return Jobs(tmp_path_factory.mktemp("names"), jobs, timeout_s=280)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(size, marks=[pytest.mark.slow] * (size != IN_DEFAULT_TIER))
        for size in SIZES
    ],
)
@pytest.mark.parametrize("check", CHECKS)
def test_a_name_of_horovods(jobs: Mapping[str, Ranks], check: str, size: int) -> None:
    for rank, output in enumerate(jobs[str(size)].outputs):
        lines = [line for line in output.splitlines() if line.startswith("{")]
        assert lines, output
        said = json.loads(lines[-1])[check]
        assert said == "ok", f"rank {rank} of {size}: {said}"
