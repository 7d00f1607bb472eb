"""The traces of real runs: valid at any time, with what launcher and ranks know."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from tests.kit.cluster import Cluster, Running
from tests.kit.waiting import eventually
from tests.trace.rules import Trace

RANKS = """
import threading
import numpy as np
import tfcluster.runtime as tfc
from tfcluster.runtime import process_group
from tfcluster.runtime.collective import Signature, ReduceOp
from tfcluster.runtime.collective.collectives import reduce_arrays

tfc.init()
what = Signature("gradients of adam", ("a float32 (1000)",))
print("up", flush=True)
while True:
    threading.Event().wait(0.02)
    reduce_arrays(process_group.group(), [np.ones(1000, "float32")], ReduceOp.SUM, what)
"""
KERAS = """
import keras
import numpy as np

x = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("adam", "mse")
saving = keras.callbacks.ModelCheckpoint("m.weights.h5", save_weights_only=True)
backup = keras.callbacks.BackupAndRestore("backup")
callbacks = [saving, backup]
model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=callbacks)
model.evaluate(x, y, verbose=0)
"""
STEPS = 12


def traced(running: Running) -> Trace:
    done = running.cluster.command("trace", running.run, "-o", "-")
    assert done.returncode == 0, done.stderr
    trace = Trace(done.stdout)
    assert trace.facts["run"] == running.run
    return trace


def task(trace: Trace, name: str) -> str:
    """The process of a task in the trace."""
    return next(each for each in trace.processes.values() if each.startswith(name))


def spans(trace: Trace, name: str, row: str) -> list[dict[str, Any]]:
    events = trace.rows[task(trace, name)].get(row, [])
    return [event for event in events if event["ph"] == "X"]


def test_a_run_without_recorded_steps(cluster: Cluster) -> None:
    """Also while it runs: start-up, attempts; in one line, how to get steps."""
    running = cluster.bash("echo up; while ! [ -e go ]; do sleep 0.05; done; exit 33")
    running.up()
    before = traced(running)
    assert before.facts["state"] == "running"
    assert before.names(task(before, "worker:0"), "task") == ["attempt 0", "spawn"]
    (cluster.folder / "go").touch()
    assert running.end() == 33
    done = cluster.command("trace")
    assert done.returncode == 0, done.stderr
    assert "--trace" in done.stderr.splitlines()[0]
    file = cluster.folder / f"{running.run}-trace.json"
    assert done.stdout == f"{file.name}\n"
    trace = Trace(file.read_text())
    launcher, host = task(trace, "launcher"), "host localhost"
    names = trace.names(launcher, "launcher")
    assert names == ["starting", "running", "stopping", "failure"]
    assert trace.names(host, "start-up")[1:] == ["connect", "start the agent"]
    rows = trace.rows[task(trace, "worker:0")]
    assert set(rows) == {"task"}
    assert [event["name"] for event in rows["task"]] == [
        "attempt 0",
        "spawn",
        "failure",
    ]
    assert rows["task"][0]["args"]["exit_code"] == 33


def test_a_traced_run_that_recorded_nothing(cluster: Cluster) -> None:
    """The hint is not to do what has been done."""
    assert cluster.bash("true", "--trace").end() == 0
    done = cluster.command("trace")
    assert done.returncode == 0, done.stderr
    assert "have recorded nothing" in done.stderr
    assert "--trace" not in done.stderr


def test_a_file_that_cannot_be_written(cluster: Cluster) -> None:
    assert cluster.bash("true").end() == 0
    done = cluster.command("trace", "-o", "no/such/folder.json")
    assert done.returncode == 8
    assert "no/such/folder.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_killed_rank_has_done_is_kept(cluster: Cluster) -> None:
    (cluster.folder / "ranks.py").write_text(RANKS)
    words = ("--trace", "--set", "runtime.warm_start=false")
    running = cluster.start("-n", "2", *words, "--", "python", "ranks.py")
    running.up(count=2)
    file = running.folder / "trace" / "worker-1.jsonl"
    eventually(file.exists, lambda: "nothing was recorded", 30.0)
    assert running.found("clock", host="localhost")
    now = traced(running)
    assert "gradients of adam" in now.names(task(now, "worker:1"), "exchanges")
    pid = running.wait_for("task", task="worker:1", state="running")["pid"]
    os.kill(pid, signal.SIGKILL)
    assert running.end() == 1
    with file.open("ab") as torn:
        torn.write(b'{"attempt":0,"host":"localhost","first":')
    trace = traced(running)
    assert trace.facts["clock_uncertainty_ms"].keys() == {"localhost"}
    for name in ("worker:0", "worker:1"):
        exchanges = [
            event
            for event in spans(trace, name, "exchanges")
            if event["name"] == "gradients of adam"
        ]
        assert len(exchanges) > 5
        # The last exchange may have been cut off in its header.
        assert {event["args"]["bytes"] for event in exchanges[:-1]} == {4000}
        (attempt, *_) = spans(trace, name, "task")
        for event in exchanges:
            assert attempt["ts"] <= event["ts"]
            # The end is the launcher's: it hears of it later.
            assert event["ts"] + event["dur"] <= attempt["ts"] + attempt["dur"]


def assert_is_that_of_the_keras_program(trace: Trace, exchange: str) -> None:
    chief = task(trace, "worker:0")
    for name in ("worker:0", "worker:1"):
        steps = spans(trace, name, "steps")
        numbers = [event["args"]["step"] for event in steps]
        assert numbers == list(range(1, len(steps) + 1))
        fits = trace.names(task(trace, name), "fit, evaluate")
        assert fits == ["fit of sequential", "evaluate of sequential"]
        assert exchange in trace.names(task(trace, name), "exchanges")
    saves = trace.names(chief, "checkpoints")
    assert saves.count("save_weights") == 2
    assert saves.count("BackupAndRestore") >= 2


@pytest.mark.slow
@pytest.mark.tensorflow
def test_keras_on_two_ranks(cluster: Cluster) -> None:
    (cluster.folder / "train.py").write_text(KERAS)
    running = cluster.start("--trace", "-n", "2", "--", "python", "train.py")
    assert running.end() == 0, running.err
    trace = traced(running)
    assert_is_that_of_the_keras_program(trace, "exchange 1 of multi_step_on_iterator")
    assert "import TensorFlow" in trace.names("host localhost", "start-up")
    ours, theirs = (spans(trace, name, "steps") for name in ("worker:0", "worker:1"))
    assert len(ours) == len(theirs) == STEPS
    # They exchange in every step, so steps of the same number end about together.
    for mine, other in zip(ours, theirs, strict=True):
        assert abs(mine["ts"] + mine["dur"] - other["ts"] - other["dur"]) < 500_000
    (fit, _) = spans(trace, "worker:0", "fit, evaluate")
    assert fit["ts"] <= ours[0]["ts"]
    assert ours[-1]["ts"] + ours[-1]["dur"] <= fit["ts"] + fit["dur"]


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.parametrize(
    "synchronous", ["true", pytest.param("false", marks=pytest.mark.exhaustive)]
)
def test_parameter_servers(cluster: Cluster, synchronous: str) -> None:
    (cluster.folder / "train.py").write_text(KERAS)
    setting = ("--set", f"runtime.synchronous={synchronous}")
    words = ("--trace", "-n", "2", "--ps", "1", *setting)
    running = cluster.start(*words, "--", "python", "train.py")
    assert running.end() == 0, running.err
    trace = traced(running)
    assert_is_that_of_the_keras_program(trace, "push adam")
    pushes = [
        event["args"]
        for event in spans(trace, "worker:1", "exchanges")
        if event["name"] == "push adam"
    ]
    # Nine float32 back, and this rank's part of as many there. The chief alone sends
    # the first ones.
    part = {"true": {0, 5}, "false": {9}}[synchronous]
    assert {each["bytes"] for each in pushes} == {(9 + sent) * 4 for sent in part}
    assert {each["transport"] for each in pushes} == {"ps"}
    updates = trace.names(task(trace, "ps:0"), "updates")
    assert len(updates) == len(pushes) * (1 if synchronous == "true" else 2)


@pytest.mark.slow
@pytest.mark.tensorflow
def test_only_the_first_steps(cluster: Cluster) -> None:
    (cluster.folder / "train.py").write_text(KERAS)
    config = {
        "command": "python train.py",
        "tasks": {"worker": 2},
        "runtime": {"trace": {"steps": 3}},
    }
    running = cluster.start(cluster.file(json.dumps(config)))
    assert running.end() == 0, running.err
    trace = traced(running)
    assert len(spans(trace, "worker:0", "steps")) == 3


@pytest.mark.slow
@pytest.mark.tensorflow
def test_exchanges_in_the_graph(cluster: Cluster) -> None:
    (cluster.folder / "train.py").write_text(KERAS)
    words = ("--trace", "-n", "2", "--set", "runtime.transport=tensorflow")
    running = cluster.start(*words, "--", "python", "train.py")
    assert running.end() == 0, running.err
    trace = traced(running)
    graphs = [
        event["args"]["exchanges"]
        for event in spans(trace, "worker:0", "exchanges")
        if event["name"].startswith("graph with")
    ]
    # One in each step, and one for each of the three batches of evaluate().
    assert sum(graphs) == STEPS + 3, graphs
    assert len(spans(trace, "worker:0", "steps")) == STEPS
