"""Tests that training goes on when data tasks of a launch are killed."""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.launch.cluster import Cluster, Running
from tests.launch.oracle import assert_nothing_left

PROGRAM = """
import keras
import tensorflow as tf

class Epochs(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("epoch", epoch, "begins", flush=True)

ROWS = 40
numbers = tf.data.Dataset.range(ROWS).map(lambda x: tf.cast(x, tf.float32)[None])
numbers = numbers.map(lambda x: (x, x)).batch(4)
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(1e-6), "mse")
model.fit(numbers, epochs=EPOCHS, verbose=0, callbacks=[Epochs()])
print("trained", flush=True)
"""


def launched(cluster: Cluster, *, restarts: int, epochs: int) -> Running:
    program = cluster.folder / "train.py"
    program.write_text(f"EPOCHS = {epochs}\n{PROGRAM}")
    config = {
        "command": f"python {program}",
        "tasks": {"worker": 2, "data": 2},
        "restart": {"max": restarts},
    }
    # JSON is valid YAML.
    return cluster.start(cluster.file(json.dumps(config)))


def kill(running: Running, task: str) -> None:
    (pid,) = [t["pid"] for t in running.status()["tasks"] if t["task"] == task]
    os.kill(pid, signal.SIGKILL)


@pytest.mark.tensorflow
@pytest.mark.timeout(400)
def test_data_tasks_that_are_killed_come_back(cluster: Cluster) -> None:
    running = launched(cluster, restarts=2, epochs=12)
    running.wait_for_text("epoch 1 begins", "worker:0", timeout_s=120)
    kill(running, "data:1")
    running.wait_for("task", task="data:1", state="running", attempt=1, timeout_s=60)
    running.wait_for_text("epoch 3 begins", "worker:0", timeout_s=120)
    kill(running, "data:0")
    assert running.end(240) == 0, running.err
    report = running.report()
    assert report["first_failure"] is None
    attempts = {task["task"]: task["attempt"] for task in report["tasks"]}
    assert attempts == {"worker:0": 0, "worker:1": 0, "data:0": 1, "data:1": 1}
    assert "trained" in running.text("worker:1")
    assert_nothing_left(running)


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.timeout(400)
def test_without_restarts_the_other_data_tasks_do_the_work(cluster: Cluster) -> None:
    running = launched(cluster, restarts=0, epochs=4)
    running.wait_for_text("epoch 1 begins", "worker:0", timeout_s=120)
    kill(running, "data:1")
    assert running.end(240) == 0, running.err
    assert "data:1 failed (killed by SIGKILL); continuing without it" in running.err
    assert "trained" in running.text("worker:0")
    assert_nothing_left(running)
