"""Parses scontrol's answers, as recorded from Slurm 24."""

from __future__ import annotations

import pytest

from tfcluster.backends.slurm.controller import (
    parse_ending,
    parse_kill_wait,
    parse_requested,
)
from tfcluster.errors import ExitCode

JOB = (
    "JobId=5 JobName=a=b UserId=root(0) JobState={state} Reason={reason} "
    "Dependency=(null) Requeue=1 Restarts={restarts} PreemptEligibleTime=Unknown "
    "PreemptTime={preempted} Power= TresPerNode=gres:gpu:2 "
)


def job(
    state: str = "COMPLETING",
    reason: str = "None",
    restarts: int = 0,
    preempted: str = "None",
) -> str:
    return JOB.format(
        state=state, reason=reason, restarts=restarts, preempted=preempted
    )


@pytest.mark.parametrize(
    ("said", "life", "expected"),
    [
        (job(), 0, None),
        (job("CANCELLED"), 0, None),
        (job("RUNNING"), 0, None),
        (job(restarts=1), 0, ExitCode.PREEMPTED),
        (job(restarts=1), 1, None),
        (job("RUNNING", preempted="2026-11-21T05:00:00"), 0, ExitCode.PREEMPTED),
        (job("PREEMPTED"), 0, ExitCode.PREEMPTED),
        (job("TIMEOUT"), 0, ExitCode.TIME_LIMIT),
        (job(reason="TimeLimit"), 0, ExitCode.TIME_LIMIT),
        ("", 0, None),
    ],
)
def test_why_a_job_ends(said: str, life: int, expected: ExitCode | None) -> None:
    assert parse_ending(said, life=life) == expected


def test_resources_are_found_behind_an_empty_field() -> None:
    assert "gpu" in parse_requested(job())
    assert "gpu" not in parse_requested("JobId=5 TRES=cpu=2,node=2 TresPerNode=(null)")
    assert "gpu" in parse_requested("JobId=5 TRES=cpu=2,gres/gpu=4")


def test_kill_wait_in_seconds() -> None:
    config = "KeepAliveTime           = SYSTEM\nKillOnBadExit = 0\n"
    config += "KillWait                = 30 sec\nLaunchParameters = (null)\n"
    assert parse_kill_wait(config) == 30.0
    assert parse_kill_wait("") is None
