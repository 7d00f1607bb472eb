"""`tfcluster resize`: more and fewer workers while a run trains."""

from __future__ import annotations

import json

import pytest

from tests.kit.cluster import Cluster
from tests.kit.oracle import assert_nothing_left

UNTIL = (
    "echo attempt $TFCLUSTER_ATTEMPT of $TFCLUSTER_SIZE; "
    '[ "$TFCLUSTER_SIZE" = {size} ] && exit 0; exec sleep 100'
)


def test_a_run_gets_more_and_fewer_workers(cluster: Cluster) -> None:
    running = cluster.bash(UNTIL.format(size=1), count=2)
    running.wait_for("state", state="running")
    done = cluster.command("resize", running.run, "worker=4")
    assert done.returncode == 0, done.stderr
    assert "resized from 2 to 4 workers" in done.stderr
    running.wait_for_text("of 4", "worker:3")
    running.wait_for_err("resized to 4 workers on localhost")
    cluster_spec = json.loads((running.folder / "plan.json").read_text())["cluster"]
    assert len(cluster_spec["worker"]) == 4
    assert cluster.command("resize", "worker=1").returncode == 0
    assert running.end() == 0, running.err
    tasks = {task["task"]: task for task in running.report()["tasks"]}
    assert tasks["worker:0"]["state"] == "succeeded"
    assert tasks["worker:0"]["attempt"] == 2
    assert tasks["worker:3"]["state"] == "stopped"
    assert running.report()["first_failure"] is None
    assert_nothing_left(running)


def test_all_reasons_against_a_resize_are_named(cluster: Cluster) -> None:
    config = cluster.file(
        "command: [bash, -c, 'echo up; exec sleep 100']\n"
        "tasks: {worker: {count: 3, min: 2}}\n"
        "runtime: {shards: 4, require_exchange: false}\n"
        "restart: {max: 1}\n"
    )
    running = cluster.start(config)
    running.wait_for("state", state="running")
    few = cluster.command("resize", "worker=1", "hosts+=node[1-2]")
    assert few.returncode == 2
    for reason in (
        "node1: backend local has only this machine",
        "node2: backend local has only this machine",
        "1 workers are fewer than 'min' (2)",
    ):
        assert reason in few.stderr
    many = cluster.command("resize", "worker=5")
    assert "4 shards are too few for 5 ranks" in many.stderr
    same = cluster.command("resize", "worker=3")
    assert "there are 3 workers already" in same.stderr
    wrong = cluster.command(
        "resize", running.run, "worker=x", "ps=2", "hosts+=a b", "y"
    )
    assert wrong.returncode == 2
    for reason in (
        "worker=x: is not a number of workers",
        "ps=2: ps tasks cannot be resized",
        "hosts+=a b: 'a b' is not a host name",
        "y: is not a change",
    ):
        assert reason in wrong.stderr.replace("error: ", ""), wrong.stderr
    assert not running.found("resized")
    assert cluster.command("stop").returncode == 0
    late = cluster.command("resize", "worker=4")
    assert late.returncode == 2
    assert "it is stopped" in late.stderr
    assert running.end() == 143
    assert_nothing_left(running)


@pytest.mark.slow
def test_parameter_servers_cannot_be_resized(cluster: Cluster) -> None:
    options = ("--ps", "1", "--set", "runtime.strategy=parameter_server")
    running = cluster.start("-n", "1", *options, "--", "sleep", "100")
    running.wait_for("state", state="running")
    done = cluster.command("resize", "worker=2")
    assert done.returncode == 2
    assert "a run with parameter servers cannot be resized" in done.stderr
    assert cluster.command("stop").returncode == 0
    assert_nothing_left(running)
