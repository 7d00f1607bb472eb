"""Tests that training goes on when data tasks of a launch are killed."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence

import pytest

from tests.kit.cluster import Cluster, Running
from tests.kit.oracle import assert_nothing_left

PROGRAM = """
import pathlib
import time

import keras
import tensorflow as tf

# Waits in the middle of some epochs until the test has killed a task.
class Epochs(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if batch != 4 or self.epoch not in WAITS:
            return
        print("in the middle of epoch", self.epoch, flush=True)
        goes_on = pathlib.Path(f"{__file__}.{self.epoch}")
        deadline = time.monotonic() + 120
        while not goes_on.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)

ROWS = 40
numbers = tf.data.Dataset.range(ROWS).map(lambda x: tf.cast(x, tf.float32)[None])
numbers = numbers.map(lambda x: (x, x)).batch(4)
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(1e-6), "mse")
model.fit(numbers, epochs=EPOCHS, verbose=0, callbacks=[Epochs()])
print("trained", flush=True)
"""


def launched(
    cluster: Cluster, *, restarts: int, epochs: int, waits: Sequence[int]
) -> Running:
    """A training that waits in the middle of the epochs ``waits``."""
    program = cluster.folder / "train.py"
    program.write_text(f"EPOCHS = {epochs}\nWAITS = {list(waits)}\n{PROGRAM}")
    config = {
        "command": f"python {program}",
        "tasks": {"worker": 2, "data": 2},
        "restart": {"max": restarts},
    }
    # JSON is valid YAML.
    return cluster.start(cluster.file(json.dumps(config)))


def kill_in_epoch(running: Running, cluster: Cluster, epoch: int, task: str) -> None:
    text = f"in the middle of epoch {epoch}"
    running.wait_for_text(text, "worker:0", timeout_s=120)
    (pid,) = [t["pid"] for t in running.status()["tasks"] if t["task"] == task]
    os.kill(pid, signal.SIGKILL)
    (cluster.folder / f"train.py.{epoch}").touch()


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.timeout(400)
def test_data_tasks_that_are_killed_come_back(cluster: Cluster) -> None:
    running = launched(cluster, restarts=2, epochs=6, waits=[1, 3])
    kill_in_epoch(running, cluster, 1, "data:1")
    running.wait_for("task", task="data:1", state="running", attempt=1, timeout_s=60)
    kill_in_epoch(running, cluster, 3, "data:0")
    assert running.end(240) == 0, running.err
    report = running.report()
    assert report["first_failure"] is None
    attempts = {task["task"]: task["attempt"] for task in report["tasks"]}
    assert attempts == {"worker:0": 0, "worker:1": 0, "data:0": 1, "data:1": 1}
    assert "trained" in running.text("worker:1")
    assert_nothing_left(running)


@pytest.mark.exhaustive
@pytest.mark.tensorflow
@pytest.mark.timeout(400)
def test_without_restarts_the_other_data_tasks_do_the_work(cluster: Cluster) -> None:
    running = launched(cluster, restarts=0, epochs=4, waits=[1])
    kill_in_epoch(running, cluster, 1, "data:1")
    assert running.end(240) == 0, running.err
    assert "data:1 failed (killed by SIGKILL); continuing without it" in running.err
    assert "trained" in running.text("worker:0")
    assert_nothing_left(running)
