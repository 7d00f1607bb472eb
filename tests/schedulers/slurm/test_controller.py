"""Parses scontrol's answers, as recorded from Slurm 24."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.schedulers.standins import env_of, program
from tfcluster.base.errors import ExitCode, StartError
from tfcluster.schedulers.slurm import SCHEDULER
from tfcluster.schedulers.slurm.controller import (
    ending,
    fields,
    has_gpus,
    kill_wait_s,
    srun_ports,
)

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
    assert ending(fields(said), life) == expected


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("BatchFlag=1 Requeue=1", None),
        ("BatchFlag=1 Requeue=0", "job 5 may not be requeued (Requeue=0)"),
        ("BatchFlag=0 Requeue=1", "job 5 has no batch script that could be started"),
        ("", None),
    ],
)
def test_why_a_job_cannot_be_requeued(
    said: str, why: str | None, tmp_path: Path
) -> None:
    program(tmp_path, "scontrol", f"echo '{said}'\n")
    environ = env_of(tmp_path, {"SLURM_JOB_ID": "5"})
    if why is None:
        SCHEDULER.require_requeuable(environ)
    else:
        with pytest.raises(StartError, match=re.escape(why)):
            SCHEDULER.require_requeuable(environ)


@pytest.mark.parametrize(
    ("state", "why"), [("CANCELLED", "job 5 was cancelled"), ("TIMEOUT", None)]
)
def test_a_cancelled_job_is_not_requeued(
    state: str, why: str | None, tmp_path: Path
) -> None:
    program(tmp_path, "scontrol", f"echo '{job(state)}'\n")
    environ = env_of(tmp_path, {"SLURM_JOB_ID": "5"})
    assert SCHEDULER.requeue(environ) == why


def test_resources_are_found_behind_an_empty_field() -> None:
    assert has_gpus(fields(job()))
    assert not has_gpus(fields("JobId=5 TRES=cpu=2,node=2 TresPerNode=(null)"))
    assert has_gpus(fields("JobId=5 TRES=cpu=2,gres/gpu=4"))


def test_kill_wait_in_seconds() -> None:
    config = "KeepAliveTime           = SYSTEM\nKillOnBadExit = 0\n"
    config += "KillWait                = 30 sec\nLaunchParameters = (null)\n"
    assert kill_wait_s(config) == 30.0
    assert kill_wait_s("") is None


@pytest.mark.parametrize(
    ("said", "ports"),
    [
        ("SrunPortRange           = 60001-63000\n", range(60001, 63001)),
        ("SrunPortRange           = 0-0\n", None),
        ("SrunPortRange           = 70000-70001\n", None),
        ("SrunEpilog              = (null)\n", None),
        ("", None),
    ],
)
def test_on_which_ports_srun_may_listen(said: str, ports: range | None) -> None:
    assert srun_ports(f"SlurmUser = root(0)\n{said}") == ports


SCONTROL = """#!/bin/sh
case "$1 $(cat calls)" in
    show*) cat state ;;
    "requeue 0") echo 1 > calls; cp "$AFTER" state; kill -TERM $$ ;;
    *) echo 2 > calls ;;
esac
"""


@pytest.mark.parametrize(
    ("after", "calls"), [("Restarts=0 Reason=TimeLimit", "2"), ("Restarts=1", "1")]
)
def test_the_command_that_requeues_may_be_ended_with_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str, calls: str
) -> None:
    """It is run again, unless Slurm had heard it."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("state", "Restarts=0"), ("after", after), ("calls", "0")):
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "scontrol").write_text(SCONTROL)
    (tmp_path / "scontrol").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environ = {"PATH": path, "SLURM_JOB_ID": "5", "AFTER": str(tmp_path / "after")}
    assert SCHEDULER.requeue(environ) is None
    assert (tmp_path / "calls").read_text().strip() == calls
