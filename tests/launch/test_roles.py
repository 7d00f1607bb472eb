"""Tests of what the end of a worker, an evaluator or a ps means for the other tasks."""

from __future__ import annotations

import json

import pytest

from tests.kit.cluster import Cluster, Running, plain
from tests.kit.oracle import assert_nothing_left
from tests.kit.time_limits import allow_s


def with_evaluator(cluster: Cluster, worker: str, evaluator: str) -> Running:
    commands = {
        "worker": {"count": 1, "command": ["bash", "-c", worker]},
        "evaluator": {"count": 1, "command": ["bash", "-c", evaluator]},
    }
    config = {
        "command": "true",
        "tasks": commands,
        "runtime": {"strategy": "none"},
        "env": {"MEETING": str(cluster.folder / "meeting")},
    }
    # JSON is valid YAML.
    return cluster.start(cluster.file(json.dumps(config)))


WAIT_FOR_MEETING = "until [ -e $MEETING ]; do sleep 0.02; done"


def test_a_failing_evaluator_is_only_a_warning(cluster: Cluster) -> None:
    running = with_evaluator(cluster, WAIT_FOR_MEETING, "exit 7")
    running.wait_for("task", task="evaluator:0", state="failed")
    assert running.process.poll() is None
    (cluster.folder / "meeting").touch()
    assert running.end() == 0
    report = running.report()
    assert report["state"] == "succeeded"
    assert report["first_failure"] is None
    assert [t["exit_code"] for t in report["tasks"]] == [0, 7]
    assert "warning: evaluator:0 failed (exited with code 7)" in running.err
    assert_nothing_left(running)


def test_an_evaluator_may_outlive_the_training(cluster: Cluster) -> None:
    running = with_evaluator(cluster, "exit 0", f"{WAIT_FOR_MEETING}; echo evaluated")
    running.wait_for("task", task="worker:0", state="succeeded")
    (cluster.folder / "meeting").touch()
    assert running.end() == 0
    assert running.text("evaluator:0") == "evaluated\n"
    assert running.found("task", task="evaluator:0", state="succeeded")
    assert_nothing_left(running)


def test_an_evaluator_is_no_part_of_the_training_cluster(cluster: Cluster) -> None:
    running = with_evaluator(cluster, "echo $TF_CONFIG", "echo $TF_CONFIG")
    assert running.end() == 0
    worker = json.loads(running.text("worker:0"))
    evaluator = json.loads(running.text("evaluator:0"))
    assert worker["task"] == {"type": "worker", "index": 0}
    assert evaluator["task"] == {"type": "evaluator", "index": 0}
    assert "evaluator" not in worker["cluster"]
    assert worker["cluster"] == evaluator["cluster"]
    assert_nothing_left(running)


def test_a_worker_may_end_well_before_the_others(cluster: Cluster) -> None:
    script = f"[ $TFCLUSTER_RANK = 0 ] || exit 0; {WAIT_FOR_MEETING}; echo done; exit 0"
    meeting = f"env.MEETING={cluster.folder}/meeting"
    running = cluster.bash(script, "--set", meeting, count=3)
    for index in (1, 2):
        running.wait_for("task", task=f"worker:{index}", state="succeeded")
    assert running.process.poll() is None
    (cluster.folder / "meeting").touch()
    assert running.end() == 0
    assert running.text("worker:0") == "done\n"
    assert_nothing_left(running)


REACH_PS = """
import json, os, socket, time
host, port = json.loads(os.environ['TF_CONFIG'])['cluster']['ps'][0].split(':')
while True:
    try:
        socket.create_connection((host, int(port))).close()
        break
    except OSError:
        time.sleep(0.05)
print('reached', flush=True)
"""


@pytest.mark.tensorflow
def test_a_ps_is_stopped_when_the_training_is_over(cluster: Cluster) -> None:
    program = cluster.folder / "reach.py"
    program.write_text(REACH_PS)
    running = cluster.start(
        *plain("--ps", "1", count=2), "--", "python", "-S", str(program)
    )
    assert running.end(50) == 0, running.err
    report = running.report()
    assert report["state"] == "succeeded"
    assert [(t["task"], t["state"]) for t in report["tasks"]] == [
        ("worker:0", "succeeded"),
        ("worker:1", "succeeded"),
        ("ps:0", "stopped"),
    ]
    told = running.found("task", task="ps:0", state="stopping")[0]
    gone = running.found("task", task="ps:0", state="stopped")[0]
    assert gone["t"] - told["t"] < allow_s(2)
    assert (
        told["t"] >= running.found("task", task="worker:1", state="succeeded")[0]["t"]
    )
    assert "TensorFlow servers" not in running.err  # nobody else can connect
    assert_nothing_left(running)
