"""Tests of ``tfcluster verify`` with programs in which a difference is planted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kit.cluster import COMMAND, Cluster
from tests.kit.json_formats import assert_format
from tests.kit.machine import carrying, parent, pids
from tests.kit.waiting import eventually
from tfcluster.verify import scratch

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(480)]
DEADLINE_S = 400.0

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
TWO_MODELS = """
def made():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4),
        keras.layers.Dense(1)])
first, second = made(), made()
first.compile("adam", "mse", metrics=["mae"])
second.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
for start in range(0, 100, 20):
    rows = slice(start, start + 20)
    print(first.train_on_batch(x[rows], y[rows]))
    second.train_on_batch(x[rows], y[rows])
print(first.test_on_batch(x, y))
first.save("first.keras")
second.save_weights("second.weights.h5")
"""
# What once differed and is equal by now.
MENDED = """
class Clipped(keras.Sequential):
    def train_step(self, data):
        a, b = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(a, training=True) - b) ** 2)
        weights = self.trainable_variables
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, weights), 0.01)
        self.optimizer.apply(gradients, weights)
        return {"loss": loss}
clipped = Clipped([keras.Input((8,)), keras.layers.Dense(1)])
clipped.compile(keras.optimizers.SGD(0.01 * (1 + rank)))
clipped.fit(x, y, batch_size=20, verbose=0)
batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(20)
optimizer = keras.optimizers.SGD(0.1)
@tf.function
def step(a, b):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((clipped(a, training=True) - b) ** 2)
    weights = clipped.trainable_variables
    gradients = [tf.clip_by_norm(g, 0.01) for g in tape.gradient(loss, weights)]
    optimizer.apply_gradients(zip(gradients, weights))
for a, b in batches:
    step(a, b)
stateful = keras.Sequential([keras.Input(batch_shape=(20, 4, 2)),
    keras.layers.LSTM(3, stateful=True), keras.layers.Dense(1)])
stateful.compile("adam", "mse")
stateful.fit(x.reshape(100, 4, 2), y, batch_size=20, verbose=0)
"""
V1 = """
import json, os
import numpy as np, tensorflow.compat.v1 as tf
tf.disable_v2_behavior()
config = json.loads(os.environ["TF_CONFIG"])
size, rank = len(config["cluster"]["worker"]), config["task"]["index"]
rng = np.random.RandomState(0)
x = rng.normal(size=(40, 8)).astype("float32")
y = (x[:, :1] > 0).astype("float32")
a, b = tf.placeholder(tf.float32, [None, 8]), tf.placeholder(tf.float32, [None, 1])
"""
V1_GRAPH = """
with tf.device(tf.train.replica_device_setter()):
    step = tf.train.get_or_create_global_step()
    kernel = tf.get_variable("kernel", [8, 1])
    hidden = tf.nn.dropout(a, rate=RATE)
    loss = tf.reduce_mean(tf.square(tf.matmul(hidden, kernel) - b))
    optimizer = OPTIMIZER
    pairs = optimizer.compute_gradients(loss)
    pairs = [(tf.clip_by_norm(g, 1e-3), v) for g, v in pairs] if CLIP else pairs
    train = optimizer.apply_gradients(pairs, step)
    averages = tf.train.ExponentialMovingAverage(0.9).apply([kernel])
hooks = HOOKS
with tf.train.MonitoredTrainingSession(hooks=hooks) as session:
    while not session.should_stop():
        session.run(train, {a: x[ROWS], b: y[ROWS]})
"""
SYNC = {
    "OPTIMIZER": "tf.train.SyncReplicasOptimizer(tf.train.AdamOptimizer(0.1), "
    "size, size)",
    "HOOKS": "[optimizer.make_session_run_hook(rank == 0, num_tokens=0)]",
    "CLIP": "False",
    "RATE": "0.0",
    "ROWS": ":",
}
V1_TOWERS = """
import tfcluster.runtime as tfc
workers = tfc.v1.workers()
def loss(tower):
    kernel = tf.get_variable("kernel", [8, 1])
    return tf.reduce_mean(tf.square(tf.matmul(a, kernel) - b))
training = tfc.v1.replicated_graph(loss, tf.train.AdamOptimizer(0.1), mean=True)
with tf.train.MonitoredTrainingSession(hooks=[training.hook]) as session:
    for _ in range(6):
        rows = np.split(rng.permutation(40), workers.num_worker)[workers.rank]
        session.run([training.train_op, training.loss], {a: x[rows], b: y[rows]})
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


def verified(
    cluster: Cluster,
    program: str,
    *words: str,
    command: Sequence[str] = ("python", "train.py"),
) -> tuple[int, Any]:
    """The exit code and the JSON answer."""
    (cluster.folder / "train.py").write_text(program)
    words = ("verify", *(words or ("-n", "2")), "--json", "--", *command)
    done = cluster.command(*words, timeout_s=DEADLINE_S)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert_format("verify", found)
    return done.returncode, found


@pytest.mark.slow
def test_fit_is_equal_to_its_end(cluster: Cluster) -> None:
    code, found = verified(cluster, DATA + MODEL + FIT)
    assert (code, found["first_difference"]) == (0, None)
    assert (found["steps"], found["to_the_end"]) == (8, True)
    assert 0 < found["largest_difference"] < 1e-5
    kinds = {"learning_rate", "weight", "slot", "logs"}
    assert kinds == found["compared"].keys()
    assert not (cluster.folder / "model.keras").exists(), "it ran in its own folder"


@pytest.mark.slow
def test_a_wrapped_program_is_recorded_alone_as_on_the_ranks(cluster: Cluster) -> None:
    wrapped = ("sh", "-c", f"exec {sys.executable} train.py")
    by_place = "20, 2, 2, [keras.callbacks.History()], 0.2"
    words = "batch_size=20, epochs=2, validation_split=0.2, verbose=2"
    program = DATA + MODEL + FIT.replace(words, by_place)
    code, found = verified(cluster, program, command=wrapped)
    assert (code, found["first_difference"], found["steps"]) == (0, None, 8)


NORMALISED = """
layers = [keras.layers.Dense(16), keras.layers.BatchNormalization(),
    keras.layers.ReLU(), keras.layers.Dense(1, dtype="float32")]
model = keras.Sequential(layers)
model.compile("adam", "mse", metrics=["mae"])
model.fit(x, y, batch_size=20, epochs=2, validation_split=0.2, verbose=2)
model.save("model.keras")
"""
HALF = 'keras.mixed_precision.set_global_policy("mixed_float16")\n'
POLICIES = pytest.mark.parametrize(
    "policy",
    [
        pytest.param("", id="float32"),
        pytest.param(HALF, id="float16", marks=pytest.mark.exhaustive),
    ],
)


@pytest.mark.exhaustive
@POLICIES
def test_a_bias_before_a_normalisation_is_equal(cluster: Cluster, policy: str) -> None:
    """Adam moves it by rounding only, alone as on the ranks."""
    code, found = verified(cluster, DATA + policy + NORMALISED)
    assert (code, found["first_difference"]) == (0, None)
    assert found["compared"]["weight"]["largest"] > 1e-3
    assert 0 < found["of_noise"] < 1


@pytest.mark.slow
@POLICIES
def test_a_real_difference_exceeds_the_noise(cluster: Cluster, policy: str) -> None:
    other = (
        'import os\ny = y + (0.05 if os.environ.get("TFCLUSTER_SIZE") == "2" else 0)\n'
    )
    code, found = verified(cluster, DATA + other + policy + NORMALISED)
    assert code == 1
    assert found["first_difference"]["of_noise"] > 1
    assert found["causes"] == []


IN_XLA = """
import os
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
class InXla(keras.Sequential):
    def compute_loss(self, *args, **kwargs):
        in_xla = GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
        is_other = in_xla and os.environ.get("TFCLUSTER_SIZE") == "2"
        return super().compute_loss(*args, **kwargs) * (1.5 if is_other else 1.0)
model = InXla([keras.layers.Dense(4), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
model.fit(x, y, batch_size=20, verbose=0)
"""


@pytest.mark.slow
def test_what_differs_only_with_xla(cluster: Cluster) -> None:
    code, found = verified(cluster, DATA + IN_XLA)
    assert (code, found["first_difference"]["kind"]) == (1, "weight")


@pytest.mark.exhaustive
def test_a_loop_that_xla_compiles(cluster: Cluster) -> None:
    compiled = LOOP.replace("@tf.function", "@tf.function(jit_compile=True)")
    program = DATA + MODEL + compiled.replace("LOSS", MEAN)
    code, found = verified(cluster, program)
    assert (code, found["first_difference"]) == (0, None)
    assert (found["steps"], found["to_the_end"]) == (5, True)
    assert 0 < found["largest_difference"] < 1e-5


@pytest.mark.exhaustive
def test_what_the_chief_prints_is_equal(cluster: Cluster) -> None:
    printed = DATA + MODEL + LOOP.replace("LOSS", MEAN) + "print(float(step(a, b)))\n"
    code, found = verified(cluster, printed)
    assert (code, found["first_difference"]) == (0, None)


def v1_graph(**words: str) -> str:
    program = V1 + V1_GRAPH
    for word, code in {**SYNC, **words}.items():
        program = program.replace(word, code)
    return program


@pytest.mark.slow
def test_steps_of_tensorflow_1(cluster: Cluster) -> None:
    """Its workers' mean equals one process, which has the same random numbers."""
    words = ("-n", "2", "--ps", "1", "--steps", "6")
    code, found = verified(cluster, v1_graph(), *words)
    assert (code, found["first_difference"]) == (0, None)
    assert (found["steps"], found["to_the_end"]) == (6, False)
    assert {"learning_rate", "weight", "slot"} == found["compared"].keys()
    assert "kernel/ExponentialMovingAverage" in found["not_compared"][0]


@pytest.mark.exhaustive
def test_a_graph_that_needs_servers(cluster: Cluster) -> None:
    """Its baseline is one worker, and the chief's loss is that of the chief's rows."""
    code, found = verified(cluster, V1 + V1_TOWERS, "-n", "2", "--ps", "1")
    assert found["compared_with"].startswith("one rank with its parameter servers")
    assert found["compared"]["weight"]["largest"] < 1e-6
    assert (code, found["first_difference"]["kind"]) == (1, "run")
    assert "covers only that worker's rows" in found["causes"][0]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("program", "causes"),
    [
        pytest.param(
            v1_graph(
                OPTIMIZER="tf.train.MomentumOptimizer(0.1, 0.9)",
                HOOKS="[]",
                RATE="0.5",
            ),
            ["each worker's gradient as it arrives, so the result differs by design"],
            id="as they arrive",
        ),
        pytest.param(
            v1_graph(ROWS="rank::size", CLIP="True"),
            ["may take two and of a slow one none", "optimizer saw them: train.py:19"],
            id="clipped by hand",
        ),
    ],
)
def test_what_differs_in_tensorflow_1(
    cluster: Cluster, program: str, causes: list[str]
) -> None:
    code, found = verified(cluster, program, "-n", "2", "--ps", "1")
    if found["first_difference"] is None:
        # The chief may have been alone in its steps.
        assert (code, len(causes)) == (0, 1)
        assert causes[0] in found["by_chance"]
        return
    assert (code, found["first_difference"]["kind"]) == (1, "weight")
    assert len(found["causes"]) == len(causes)
    for cause, said in zip(causes, found["causes"], strict=True):
        assert cause in said


@pytest.mark.exhaustive
def test_what_is_equal_by_now(cluster: Cluster) -> None:
    """Clipping by hand, a rate by the rank, layers that keep states of their rows."""
    rank = 'import os\nrank = int(os.environ.get("TFCLUSTER_RANK", "0"))\n'
    program = rank + DATA + MENDED
    code, found = verified(cluster, program, "-n", "2", "--steps", "0")
    assert (code, found["first_difference"]) == (0, None)
    assert (found["steps"], found["to_the_end"]) == (15, True)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "strategy",
    ["collective", pytest.param("replicated", marks=pytest.mark.exhaustive)],
)
def test_several_models(cluster: Cluster, strategy: str) -> None:
    servers = () if strategy == "collective" else ("--ps", "1")
    words = ("-n", "2", *servers, "--set", f"runtime.strategy={strategy}")
    code, found = verified(cluster, DATA + TWO_MODELS, *words)
    assert (code, found["first_difference"]) == (0, None)
    assert (found["steps"], found["to_the_end"]) == (10, True)
    assert {"learning_rate", "weight", "slot", "logs"} == found["compared"].keys()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ("--set", "runtime.strategy=local_sgd"),
            id="local_sgd",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            ("--ps", "1", "--set", "runtime.strategy=parameter_server"),
            id="asynchronous",
        ),
    ],
)
def test_what_differs_by_design(cluster: Cluster, words: Sequence[str]) -> None:
    code, found = verified(cluster, DATA + TWO_MODELS, "-n", "2", *words)
    assert (code, found["first_difference"]["kind"]) == (1, "weight")
    assert [cause.rpartition(", ")[2] for cause in found["causes"]] == [
        "so the result differs by design"
    ]


PLANTED = {
    "a rate by the rank, later": (
        DATA
        + MODEL
        + FIT.replace(
            "epochs=2",
            "epochs=2, callbacks=[keras.callbacks.LearningRateScheduler("
            "lambda epoch: 0.01 * (1 + rank * epoch))]",
        ),
        "refused",
        "differs between rank 0 and rank 1",
    ),
    "unseeded data in a loop": (
        DATA.replace("default_rng(0)", "default_rng([*os.urandom(4)])")
        + MODEL
        + LOOP.replace("LOSS", MEAN),
        "weight",
        "the program is not deterministic",
    ),
    "a rate by the number of ranks": (
        DATA + MODEL + FIT.replace('"adam"', "keras.optimizers.SGD(0.01 * size)"),
        "learning_rate",
        "by its rank or by the number of ranks",
    ),
    "unseeded data": (
        DATA.replace("default_rng(0)", "default_rng([*os.urandom(4)])") + MODEL + FIT,
        "weight",
        "the program is not deterministic",
    ),
}


VARIANTS = {
    "unseeded data",
    "a rate by the number of ranks",
    "a rate by the rank, later",
}
"""They find what others of PLANTED find in another kind of program."""


@pytest.mark.exhaustive
def test_a_sum_over_the_rows_is_equal(cluster: Cluster) -> None:
    summed = DATA + MODEL + LOOP.replace("LOSS", MEAN.replace("mean", "sum"))
    code, found = verified(cluster, summed)
    assert (code, found["first_difference"]) == (0, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in VARIANTS else [])
        for name in PLANTED
    ],
)
def test_planted(cluster: Cluster, name: str) -> None:
    program, kind, cause = PLANTED[name]
    own = (
        'import os\nsize = int(os.environ.get("TFCLUSTER_SIZE", "1"))\n'
        'rank = int(os.environ.get("TFCLUSTER_RANK", "0"))\n'
    )
    code, found = verified(cluster, own + program)
    assert code == 1
    if kind == "refused":
        assert found["failed_on_ranks"]["refused"]
        assert cause in found["failed_on_ranks"]["reason"]
        return
    assert found["first_difference"]["kind"] == kind
    assert cause in found["causes"][0]


_THREE = ("-n", "3")
_REPLICATED = ("-n", "2", "--ps", "1", "--set", "runtime.strategy=replicated")
_SYNCHRONOUS = (
    *("-n", "2", "--ps", "1", "--set", "runtime.strategy=parameter_server"),
    *("--set", "runtime.synchronous=true"),
)


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        pytest.param(_THREE, "0", id="three", marks=pytest.mark.exhaustive),
        pytest.param(_REPLICATED, "4", id="replicated", marks=pytest.mark.exhaustive),
        pytest.param(_SYNCHRONOUS, "0", id="synchronous", marks=pytest.mark.exhaustive),
        pytest.param(_THREE, "4", id="three-4", marks=pytest.mark.exhaustive),
        pytest.param(_REPLICATED, "0", id="replicated-0", marks=pytest.mark.exhaustive),
        pytest.param(
            _SYNCHRONOUS, "4", id="synchronous-4", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_equal_under(cluster: Cluster, words: Sequence[str], steps: str) -> None:
    code, found = verified(cluster, DATA + MODEL + FIT, *words, "--steps", steps)
    assert (code, found["first_difference"]) == (0, None)
    assert found["to_the_end"] == (steps == "0")
    assert found["steps"] == (8 if steps == "0" else 4)
    assert "slot" in found["compared"]


def test_usage(cluster: Cluster) -> None:
    for words, said in (
        ((), "nothing to verify"),
        (("-n", "1", "--", "python", "-c", "0"), "one rank is the baseline"),
        (("-n", "2", "--", "python", "no.py"), "there is no no.py"),
        (
            ("-n", "2", "--set", "runtime.strategy=none", "--", "true"),
            "nothing to compare",
        ),
        (
            ("-n", "2", "--set", "runtime.strategy=colective", "--", "true"),
            "did you mean 'collective'",
        ),
        (("-n", "2", "--", "no-program"), "is not an executable program"),
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
            return any((one / "alone" / "work" / "up").exists() for one in new)

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
