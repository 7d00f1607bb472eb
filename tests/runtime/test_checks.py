"""Functions that need TensorFlow, checked in a separate process.

Importing TensorFlow has side effects on the process, which other tests would see.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from tests.kit.ranks import Job, Ranks, run_jobs

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]

PROGRAMS = ("ps_rows", "tensor_lists")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ranks]:
    jobs = [Job(name, 1, f"{name}.py") for name in PROGRAMS]
    return run_jobs(tmp_path_factory.mktemp("checks"), jobs, timeout_s=100)


@pytest.mark.parametrize("program", PROGRAMS)
def test_all_checks_pass(jobs: Mapping[str, Ranks], program: str) -> None:
    output = jobs[program].outputs[0]
    *_, last = [line for line in output.splitlines() if line.startswith("{")]
    found = json.loads(last)
    assert len(found) > 1
    assert not {name: text for name, text in found.items() if text != "ok"}
