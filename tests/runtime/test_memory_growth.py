"""Memory must not grow with steps: even a small leak would end a long training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.ranks import Job, run_jobs

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(240)]

GROWTH_KIB = 4096
"""Less than half a KiB per step for 10,000 steps."""


@pytest.mark.exhaustive
def test_memory_does_not_grow_with_steps(tmp_path: Path) -> None:
    jobs = run_jobs(tmp_path, [Job("many", 2, "many_steps.py")], timeout_s=220)
    for output in jobs["many"].outputs:
        growth = json.loads(output.splitlines()[-1])
        assert growth["fit"] < GROWTH_KIB, output
        assert growth["allreduce"] < GROWTH_KIB, output
