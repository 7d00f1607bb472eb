"""``launcher`` decides how agents are started, if that way can reach the hosts."""

from __future__ import annotations

import pytest

from tests.plan.descriptions import describe
from tfcluster import schedulers
from tfcluster.base.errors import ConfigError


@pytest.mark.parametrize(
    ("backend", "launcher", "starter"),
    [
        ("local", "auto", "local"),
        ("ssh", "auto", "ssh"),
        ("slurm", "auto", "slurm"),
        ("slurm", "ssh", "ssh"),
        ("slurm", "srun", "slurm"),
        ("sge", "ssh", "ssh"),
        ("sge", "qrsh", "sge"),
    ],
)
def test_who_starts_agents(backend: str, launcher: str, starter: str) -> None:
    description = describe({"worker": 1}, backend=backend, launcher=launcher)
    assert schedulers.of_launcher(description) is schedulers.get(starter)


@pytest.mark.parametrize(
    ("backend", "launcher"),
    [("local", "ssh"), ("ssh", "srun"), ("ssh", "local"), ("slurm", "qrsh")],
)
def test_ways_that_lead_nowhere(backend: str, launcher: str) -> None:
    description = describe({"worker": 1}, backend=backend, launcher=launcher)
    with pytest.raises(ConfigError, match=f"launcher {launcher} cannot start agents"):
        schedulers.of_launcher(description)
