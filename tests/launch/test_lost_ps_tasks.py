"""Tests of training with parameter servers when a task is lost."""

from __future__ import annotations

import os
import signal

import pytest

from tests.kit.cluster import Cluster, Running
from tests.kit.oracle import assert_nothing_left

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

DEADLINE_S = 120.0

# Each task prints the epochs it has finished. On its first attempt, worker:0 pauses
# after its third epoch; the chief waits after its third epoch until worker:0 is back.
TRAIN = """
import os, signal, time
from pathlib import Path
import keras
import numpy as np

task = os.environ["TFCLUSTER_TASK"]
attempt = os.environ["TFCLUSTER_ATTEMPT"]


class Say(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(f"attempt {attempt} epoch {epoch}.", flush=True)
        if epoch == 2 and task == "worker:0" and attempt == "0":
            signal.pause()
        if epoch == 2 and task == "worker:0":
            Path("back").touch()
        while epoch == 2 and task == "chief:0" and not Path("back").exists():
            time.sleep(0.02)


keras.utils.set_random_seed(1)
x = np.random.normal(size=(96, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.05), "mse")
model.fit(x, x @ [1.0, 2.0, 3.0, 4.0], epochs=12, verbose=0, callbacks=[Say()])
print(f"weights {np.round(model.get_weights()[0].reshape(-1))}", flush=True)
"""


def begun(cluster: Cluster, *options: str) -> Running:
    """Start a launch and wait until worker:0 pauses after its third epoch."""
    (cluster.folder / "train.py").write_text(TRAIN)
    config = cluster.file(
        "command: python train.py\ntasks: {chief: 1, worker: 2, ps: 2}\ngrace: 5s\n"
    )
    running = cluster.start(config, *options)
    running.wait_for_text("attempt 0 epoch 2.", "worker:0", timeout_s=DEADLINE_S)
    return running


def kill(running: Running, task: str) -> None:
    (found,) = [t for t in running.status()["tasks"] if t["task"] == task]
    os.kill(found["pid"], signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_worker_comes_back_and_the_others_never_stop(cluster: Cluster) -> None:
    options = ("--set", "restart.max=1", "--set", "restart.scope=task")
    running = begun(cluster, *options)
    # The other worker does not wait for the paused one.
    running.wait_for_text("epoch 11.", "worker:1", timeout_s=DEADLINE_S)
    kill(running, "worker:0")
    assert running.end(DEADLINE_S) == 0
    tasks = {task["task"]: task for task in running.status()["tasks"]}
    attempts = {name: task["attempt"] for name, task in tasks.items()}
    assert attempts.pop("worker:0") == 1
    assert set(attempts.values()) == {0}
    # It resumed after the epochs that it had already finished.
    assert "attempt 1 epoch 2." in running.text("worker:0")
    assert "attempt 1 epoch 1." not in running.text("worker:0")
    assert "attempt 1 epoch 11." in running.text("worker:0")
    for task in ("chief:0", "worker:0", "worker:1"):
        assert "weights [1. 2. 3. 4.]" in running.text(task)
        assert tasks[task]["step"] > 0
    assert_nothing_left(running)


@pytest.mark.exhaustive
def test_a_killed_worker_ends_the_run_where_nobody_restarts_it(
    cluster: Cluster,
) -> None:
    running = begun(cluster)
    kill(running, "worker:0")
    assert running.end(DEADLINE_S) == 1
    failure = running.report()["first_failure"]
    assert failure["task"] == "worker:0"
    assert failure["signal"] == "SIGKILL"
    assert_nothing_left(running)


@pytest.mark.slow
def test_a_killed_ps_is_named_and_ends_the_run(cluster: Cluster) -> None:
    running = begun(cluster)
    kill(running, "ps:1")
    assert running.end(DEADLINE_S) == 1
    assert running.report()["first_failure"]["task"] == "ps:1"
    assert_nothing_left(running)
