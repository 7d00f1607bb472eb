"""TensorFlow 1 scripts under the real command: no process outlives its run."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kit.cluster import Cluster, Running
from tests.kit.oracle import assert_nothing_left, assert_nothing_runs
from tests.runtime.harness import told

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "v1_between_graph.py"
SCRIPT = Path(__file__).parent / "programs" / "v1" / "script.py"
DEADLINE_S = 150.0

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(240)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.end()
    assert_nothing_runs(cluster)


def launch(
    cluster: Cluster, program: Path, *args: str, options: tuple[str, ...] = ()
) -> Running:
    counts = ("-n", "2", "--ps", "1")
    return cluster.start(*counts, *options, "--", "python", str(program), *args)


def states(running: Running) -> dict[str, str]:
    return {task["task"]: task["state"] for task in running.report()["tasks"]}


def said(text: str, name: str) -> Any:
    (found,) = told(text, name)
    return found


def accuracy(text: str) -> float:
    (found,) = re.findall(r"best validation accuracy ([\d.]+)", text)
    return float(found)


@pytest.mark.slow
def test_no_ps_is_left_after_success(cluster: Cluster) -> None:
    """An unmodified script learns real digits, and only the chief writes files."""
    folder = cluster.folder / "checkpoints"
    running = launch(cluster, EXAMPLE, "--steps", "600", "--checkpoints", str(folder))
    assert running.end(DEADLINE_S) == 0, running.err
    assert states(running) == {
        "worker:0": "succeeded",
        "worker:1": "succeeded",
        "ps:0": "stopped",
    }
    assert accuracy(running.text("worker:0")) > 0.93
    assert (folder / "checkpoint").exists()
    steps = [task["step"] for task in running.report()["tasks"]]
    # Both have trained: it is all but impossible that one took all 600 steps.
    assert all(steps[rank] and steps[rank] > 20 for rank in (0, 1)), steps
    assert_nothing_left(running)


@pytest.mark.slow
def test_no_ps_is_left_after_a_crash(cluster: Cluster) -> None:
    running = launch(cluster, SCRIPT, "fails")
    assert running.end(DEADLINE_S) == 1
    report = running.report()
    assert report["first_failure"]["task"] == "worker:1"
    assert report["first_failure"]["cause"] == "ValueError: boom"
    assert states(running)["ps:0"] == "stopped"
    assert_nothing_left(running)


@pytest.mark.slow
def test_no_ps_is_left_after_ctrl_c(cluster: Cluster) -> None:
    running = launch(cluster, SCRIPT, "waits")
    running.wait_for_text("begun", "worker:0", "worker:1", timeout_s=DEADLINE_S)
    # A ps sees no GPU, even if the machine has one.
    plan = {task["task"]: task for task in running.plan()["tasks"]}
    assert plan["ps:0"]["env"]["CUDA_VISIBLE_DEVICES"] == ""
    assert plan["worker:1"]["device_filters"] == ["/job:ps", "/job:worker/task:1"]
    os.kill(running.process.pid, signal.SIGINT)
    assert running.end(DEADLINE_S) == 130
    assert states(running)["ps:0"] == "stopped"
    assert_nothing_left(running)


@pytest.mark.slow
def test_a_ps_sees_no_gpu(cluster: Cluster) -> None:
    planned = cluster.command(
        "plan",
        cluster.file("command: python x.py\ntasks: {worker: 1, ps: 2}"),
        "--json",
    )
    tasks = {task["task"]: task for task in json.loads(planned.stdout)["tasks"]}
    for name in ("ps:0", "ps:1"):
        assert tasks[name]["env"]["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.slow
def test_sync_replicas_end_together(cluster: Cluster) -> None:
    """The mean over both workers, by TensorFlow's own SyncReplicasOptimizer.

    The script runs as a module, whose source is not read: its session identifies it.
    """
    (cluster.folder / "script_of_old.py").write_text(SCRIPT.read_text())
    module = ("-m", "script_of_old", "synchronous")
    running = cluster.start("-n", "2", "--ps", "1", "--", "python", *module)
    status, seconds = running.end_timed(DEADLINE_S)
    assert status == 0, running.err
    # TensorFlow by itself waits for two minutes at the end.
    assert seconds < 60
    for worker in ("worker:0", "worker:1"):
        seen = said(running.text(worker), "synchronous")["seen"]
        assert seen
        # Each step is the mean of 1 and 2.
        assert all(w == pytest.approx(-1.5 * step, abs=1.6) for step, w in seen)
        assert seen[-1][0] <= 30
    assert "without any training" not in running.err
    assert_nothing_left(running)


@pytest.mark.slow
def test_the_chief_builds_the_whole_graph(cluster: Cluster) -> None:
    """The workers are built-in servers without a script, under the default strategy."""
    config = {
        "command": ["python", str(SCRIPT), "whole_graph"],
        "tasks": {"chief": 1, "worker": {"count": 2, "server": True}, "ps": 1},
    }
    running = cluster.start(cluster.file(json.dumps(config)))
    assert running.end(DEADLINE_S) == 0, running.err
    assert said(running.text("chief:0"), "whole_graph") == {
        "w": [-3.0] * 3,
        "on": ["/job:worker/task:0", "/job:worker/task:1"],
    }
    assert_nothing_left(running)
