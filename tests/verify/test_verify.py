"""Tests of ``tfcluster verify`` with programs in which a difference is planted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.launch.cluster import COMMAND, Cluster
from tests.launch.machine import carrying, eventually, parent, pids
from tfcluster.verify import scratch

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(240)]
DEADLINE_S = 200.0

DATA = """
import numpy as np, keras, tensorflow as tf
rng = np.random.default_rng(0)
x = rng.normal(size=(100, 8)).astype("float32")
y = (x[:, :1] > 0).astype("float32")
"""
MODEL = """
model = keras.Sequential([
    keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)])
"""
LOOP = """
batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(20)
@tf.function
def step(a, b):
    with tf.GradientTape() as tape:
        loss = LOSS
    weights = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
    return loss
optimizer = keras.optimizers.Adam()
for a, b in batches:
    step(a, b)
"""
FIT = """
model.compile("adam", "mse", metrics=["mae"])
model.fit(x, y, batch_size=20, epochs=2, validation_split=0.2, verbose=2)
model.save("model.keras")
"""
CUSTOM_STEP = """
class CustomStep(keras.Sequential):
    def train_step(self, data):
        a, b = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(a, training=True) - b) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}
"""
MEAN = "tf.reduce_mean((model(a, training=True) - b) ** 2)"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, {"TMPDIR": str(tmp_path / "tmp")})
    (tmp_path / "tmp").mkdir()
    yield cluster
    # TensorFlow leaves empty folders of its own there.
    left = list((tmp_path / "tmp").glob(f"{scratch.PREFIX}*"))
    assert not left, "verify left files"
    assert not carrying(f"TMPDIR={tmp_path / 'tmp'}"), "verify left processes"


def verified(cluster: Cluster, program: str, *words: str) -> tuple[int, Any]:
    """The exit code and the JSON answer."""
    (cluster.folder / "train.py").write_text(program)
    command = ["verify", *(words or ("-n", "2")), "--json", "--", "python", "train.py"]
    done = cluster.command(*command, timeout_s=DEADLINE_S)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_fit_is_equal_to_its_end(cluster: Cluster) -> None:
    code, found = verified(cluster, DATA + MODEL + FIT)
    assert (code, found["first_difference"]) == (0, None)
    assert (found["steps"], found["to_the_end"]) == (8, True)
    assert 0 < found["largest_difference"] < 1e-5
    kinds = {"learning_rate", "weight", "slot", "logs"}
    assert kinds == found["compared"].keys()
    assert not (cluster.folder / "model.keras").exists(), "it ran in its own folder"


def test_what_the_chief_prints_is_compared(cluster: Cluster) -> None:
    printed = DATA + MODEL + LOOP.replace("LOSS", MEAN) + "print(float(step(a, b)))\n"
    code, found = verified(cluster, printed)
    assert code == 1
    assert found["first_difference"]["kind"] == "printed"
    assert "covers only that rank's rows" in found["causes"][0]


PLANTED = {
    "a sum loss": (
        DATA + MODEL + LOOP.replace("LOSS", MEAN.replace("mean", "sum")),
        "refused",
        "the loss is a sum over the rows",
    ),
    "a rate by the number of ranks": (
        DATA + MODEL + FIT.replace('"adam"', "keras.optimizers.SGD(0.01 * size)"),
        "learning_rate",
        "by its rank or by the number of ranks",
    ),
    "unseeded data": (
        DATA.replace("default_rng(0)", "default_rng()") + MODEL + FIT,
        "weight",
        "the program is not deterministic",
    ),
    "a stateful layer": (
        DATA
        + "x = x.reshape(100, 4, 2)\n"
        + CUSTOM_STEP
        + "model = CustomStep([keras.Input(batch_shape=(20, 4, 2)), "
        "keras.layers.LSTM(3, stateful=True), keras.layers.Dense(1)])\n"
        + FIT.replace("validation_split=0.2, ", "").replace(', metrics=["mae"]', ""),
        "refused",
        "it keeps a state for each row",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_planted(cluster: Cluster, name: str) -> None:
    program, kind, cause = PLANTED[name]
    size = 'import os\nsize = int(os.environ.get("TFCLUSTER_SIZE", "1"))\n'
    code, found = verified(cluster, size + program)
    assert code == 1
    if kind == "refused":
        assert found["failed_on_ranks"]["refused"]
        assert cause in found["failed_on_ranks"]["reason"]
        return
    assert found["first_difference"]["kind"] == kind
    assert cause in found["causes"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("-n", "3"),
        ("-n", "2", "--ps", "1", "--strategy", "replicated"),
        (
            *("-n", "2", "--ps", "1", "--strategy", "parameter_server"),
            *("--set", "runtime.synchronous=true"),
        ),
    ],
    ids=["three", "replicated", "synchronous"],
)
@pytest.mark.parametrize("steps", ["0", "4"])
def test_equal_under(cluster: Cluster, words: Sequence[str], steps: str) -> None:
    code, found = verified(cluster, DATA + MODEL + FIT, *words, "--steps", steps)
    assert (code, found["first_difference"]) == (0, None)
    assert found["to_the_end"] == (steps == "0")
    assert found["steps"] == (8 if steps == "0" else 4)


def test_usage(cluster: Cluster) -> None:
    for words, said in (
        ((), "nothing to verify"),
        (("-n", "1", "--", "python", "-c", "0"), "one rank is the baseline"),
        (("-n", "2", "--", "python", "no.py"), "there is no no.py"),
        (("-n", "2", "--strategy", "none", "--", "true"), "nothing to compare"),
    ):
        done = cluster.command("verify", *words)
        assert done.returncode in (2, 4)
        assert said in done.stderr


# --- nothing is left ------------------------------------------------------------------


def test_a_killed_verify_leaves_nothing(cluster: Cluster) -> None:
    """Its ranks wait to be stopped, and nobody else knows of them."""
    endless = "import time, pathlib\npathlib.Path('up').touch()\ntime.sleep(600)\n"
    (cluster.folder / "train.py").write_text(endless)
    temporary = cluster.folder / "tmp"

    def folders() -> list[Path]:
        return list(temporary.glob(f"{scratch.PREFIX}*"))

    def started() -> tuple[subprocess.Popen[bytes], Path]:
        before = set(folders())
        words = [*COMMAND, "verify", "-n", "2", "--", "python", "train.py"]
        process = subprocess.Popen(words, cwd=cluster.folder, env=cluster.environ)
        new: list[Path] = []

        def is_up() -> bool:
            new[:] = set(folders()) - before
            return any((one / "alone/work/up").exists() for one in new)

        eventually(is_up, lambda: "the program did not start", DEADLINE_S)
        return process, new[0]

    def launcher_of(process: subprocess.Popen[bytes]) -> int:
        (found,) = [pid for pid in pids() if parent(pid) == process.pid]
        return found

    def none_runs() -> None:
        mark = f"TMPDIR={temporary}"
        eventually(lambda: not carrying(mark), lambda: str(carrying(mark)), DEADLINE_S)

    # Its launcher ends the run and removes the folder.
    killed, _ = started()
    killed.kill()
    killed.wait()
    none_runs()
    assert not folders()

    # Its processes end without its launcher, too. The next verify removes the folder,
    # but not that of another one.
    living, folder = started()
    killed, left = started()
    launcher = launcher_of(killed)
    killed.send_signal(signal.SIGSTOP)
    os.kill(launcher, signal.SIGKILL)
    killed.kill()
    killed.wait()
    assert set(folders()) == {folder, left}
    done = cluster.command("verify", "--", "python", "-c", "raise SystemExit(3)")
    assert "the program fails in one process" in done.stdout
    assert folders() == [folder]
    living.terminate()
    living.wait()
    none_runs()
    assert not folders()
