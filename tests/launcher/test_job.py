"""What is shown and accepted after a resize, which everybody learns from one holder."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from tests.plan.descriptions import describe
from tfcluster.base.task_id import TaskId
from tfcluster.console.display import DEFAULT
from tfcluster.launcher.job import CurrentJob, Job
from tfcluster.launcher.launch import prepare
from tfcluster.launcher.run_output import RunOutput
from tfcluster.plan.model import Allocation, Host

GPU_SEARCH = "2026-11-28 10:00:00.123456: W x.cc:1] Could not find cuda drivers"
H1, H2 = Host(name="h1", gpus=()), Host(name="h2", gpus=())


def job() -> Job:
    described = describe({"worker": 1}, backend="ssh")
    prepared = prepare(described, Allocation(hosts=(H1,)))
    return Job(
        run="r",
        description=described,
        allocation=prepared.allocation,
        specs={spec.task: spec for spec in prepared.specs},
        secrets={},
        token="0",
        logs=Path("/logs"),
    )


def resize(current: CurrentJob, *hosts: Host) -> None:
    current.adopt(current.job.resized(hosts, len(hosts)))


@pytest.fixture
def current() -> CurrentJob:
    return CurrentJob(job())


def test_the_output_of_tasks_on_a_new_host_is_known(current: CurrentJob) -> None:
    out = io.StringIO()
    show = RunOutput.on_terminal(current, out, io.StringIO(), {}, DEFAULT)
    resize(current, H1, H2)
    show.log("worker:1", [GPU_SEARCH, "epoch 1"], 0)
    show.close()
    assert "epoch 1" in out.getvalue()
    assert "cuda" not in out.getvalue(), "it is known that it has no GPU"


def test_messages_from_earlier_hosts_stay_valid(current: CurrentJob) -> None:
    resize(current, H2)
    worker = TaskId("worker", 0)
    assert current.owners == {(worker, "h1"), (worker, "h2")}


def test_an_interpreter_is_known_before_and_after_the_resize(
    current: CurrentJob,
) -> None:
    current.planned = current.job.resized((H1, H2), 2)
    current.set_python("h2", ("/opt/python",))
    assert current.planned.pythons == current.job.pythons == {"h2": ("/opt/python",)}
    resize(current, H1, H2)
    assert current.job.specs[TaskId("worker", 1)].python == ("/opt/python",)
