"""When a launcher asks its scheduler for another start, and what it records of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.plan.descriptions import describe
from tfcluster.base.errors import ExitCode
from tfcluster.base.states import RunState
from tfcluster.launcher.run_end import is_due, requeue
from tfcluster.lifecycle.actions import Finish
from tfcluster.lifecycle.events import Interrupted
from tfcluster.plan.model import Restart
from tfcluster.record.continuation import Earlier
from tfcluster.record.files import read_json
from tfcluster.record.paths import RunPaths, create_run
from tfcluster.schedulers.base import Requeuing

RESTART = Restart(max=2, on_time_limit="requeue")
ENDED = Finish(RunState.STOPPED, ExitCode.TIME_LIMIT)
LIMIT = Interrupted(ExitCode.TIME_LIMIT)


class FakeScheduler(Requeuing):
    """Answers as told; what was recorded before it was asked is kept."""

    def __init__(self, refusal: str | None = None) -> None:
        self.refusal = refusal
        self.events: list[dict[str, Any]] = []
        self.known_when_asked: list[dict[str, Any]] | None = None

    def record(self, event: Mapping[str, Any]) -> None:
        self.events.append(dict(event))

    def job(self, env: Mapping[str, str]) -> str:
        return env["JOB"]

    def is_started_again(self, env: Mapping[str, str]) -> bool:
        return False

    def require_requeuable(self, env: Mapping[str, str]) -> None:
        return None

    def requeue(self, env: Mapping[str, str]) -> str | None:
        self.known_when_asked = list(self.events)
        return self.refusal

    def asked(self, paths: RunPaths, known: Earlier, **restart: Any) -> str:
        keys = {"max": 2, "on_time_limit": "requeue", **restart}
        described = describe({"worker": 2}, backend="slurm", restart=Restart(**keys))
        return requeue(described, self, {"JOB": "7"}, paths, known, self.record)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return create_run(tmp_path, "digits", time.time())


@pytest.mark.parametrize(
    ("restart", "finish", "signals", "due"),
    [
        (RESTART, ENDED, [LIMIT], True),
        (RESTART, ENDED, [LIMIT, Interrupted(ExitCode.TERMINATED)], True),
        (RESTART, ENDED, [LIMIT, Interrupted(ExitCode.INTERRUPTED)], False),
        (RESTART, ENDED, [Interrupted(ExitCode.HANGUP), LIMIT], False),
        (Restart(max=2), ENDED, [LIMIT], False),
        (RESTART, Finish(RunState.FAILED, 1), [LIMIT], False),
        (RESTART, Finish(RunState.SUCCEEDED, 0), [LIMIT], False),
        (RESTART, Finish(RunState.STOPPED, ExitCode.PREEMPTED), [], False),
    ],
)
def test_only_the_time_limit_alone_counts(
    restart: Restart, finish: Finish, signals: list[Interrupted], due: bool
) -> None:
    assert is_due(restart, finish, signals) is due


def test_the_intent_is_recorded_before_the_scheduler_is_asked(paths: RunPaths) -> None:
    scheduler = FakeScheduler()
    before = Earlier(run="digits-1", requeues=1, restarts=(5.0,))
    said = scheduler.asked(paths, before)
    assert "requeued after the time limit (2nd time; restart 2 of 2)" in said
    assert "the time limit of job 7 ended this run" in said
    (event,) = scheduler.known_when_asked or [{}]
    assert (event["job"], event["count"], event["restarts"][0]) == ("7", 2, 5.0)
    assert event["restarts"][1] == pytest.approx(time.time(), abs=60)
    job = read_json(paths.job) or {}
    assert (job["job"], job["backend"]) == ("7", "slurm")


def test_the_restarts_of_all_runs_count_against_the_maximum(paths: RunPaths) -> None:
    scheduler = FakeScheduler()
    before = Earlier(requeues=1, restarts=(time.time() - 90, time.time() - 5))
    said = scheduler.asked(paths, before)
    assert "it was not requeued: all 2 restarts are used (restart.max)" in said
    assert scheduler.known_when_asked is None
    assert not scheduler.events
    assert not paths.job.exists()
    assert "(2nd time; restart 2 of 2)" in scheduler.asked(paths, before, within_s=60.0)


def test_a_refusal_is_recorded_and_said(paths: RunPaths) -> None:
    scheduler = FakeScheduler("job 7 was cancelled")
    said = scheduler.asked(paths, Earlier())
    assert "it was not requeued: job 7 was cancelled" in said
    assert scheduler.events[-1] == {"job": "7", "refused": "job 7 was cancelled"}
