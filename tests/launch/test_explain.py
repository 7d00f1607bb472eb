"""Tests of ``tfcluster explain`` with programs that ranks cannot divide entirely."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kit.cluster import Cluster
from tests.kit.json_formats import assert_format

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(240)]
DEADLINE_S = 200.0

PROGRAM = """
import tensorflow as tf
weights = tf.Variable(tf.ones((64, 32)))

def seen(values):
    return values

@tf.function
def step(batch):
    with tf.GradientTape() as tape:
        made = tf.matmul(batch, weights)
        best = tf.sort(made, axis=0)[:4]
        loss = tf.reduce_mean(made ** 2) + tf.reduce_mean(best)
    tf.py_function(seen, [made], tf.float32)
    weights.assign_sub(0.1 * tape.gradient(loss, weights))
    return loss

@tf.function
def measured(batch):
    return tf.reduce_mean(tf.matmul(batch, weights))

for number in range(100):
    print("step", number, flush=True)
    step(tf.random.normal((40, 64)))
    measured(tf.random.normal((8, 64)))
raise ValueError("not reached")
"""


def line_of(text: str) -> int:
    (number,) = [i for i, line in enumerate(PROGRAM.splitlines(), 1) if text in line]
    return number


def explained(cluster: Cluster, program: str, *words: str) -> tuple[Any, str]:
    """The JSON answer, and what was written to stderr."""
    (cluster.folder / "train.py").write_text(program)
    command = ("explain", *words, "--json", "--", "python", "train.py")
    done = cluster.command(*command, timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert_format("explain", found)
    return found, done.stderr


def test_shares_gathers_and_whole_ops_with_their_lines(cluster: Cluster) -> None:
    found, said = explained(cluster, PROGRAM, "-n", "4")
    assert "Traceback" not in said
    assert [line for line in said.splitlines() if "step " in line] == [
        "step 0",
        "step 1",
    ]
    assert (found["ranks"], found["mostly_whole"]) == (4, None)
    first, second = found["functions"]
    assert (first["name"], first["rows"], first["trains"]) == ("step", 40, True)
    assert (second["name"], second["rows"]) == ("measured", 8)
    # Two products, and the ops on their results.
    assert first["cost"] > 2 * 40 * 64 * 32
    assert 0.8 < first["divided_share"] < 1
    assert second["divided_share"] > 0.99
    gathers = [each for each in first["exchanged"] if each["kind"] == "rows"]
    sort = f"train.py:{line_of('tf.sort')}:step"
    call = f"train.py:{line_of('tf.py_function(')}:step"
    size = 40 * 32 * 4
    assert {(each["line"], each["bytes"]) for each in gathers} >= {
        (sort, size),
        (call, size),
    }
    sums = [each["bytes"] for each in first["exchanged"] if each["kind"] == "sum"]
    assert max(sums) == 64 * 32 * 4
    assert sum(each["bytes"] for each in first["exchanged"]) == first["exchanged_bytes"]
    whole = {each["op"]: each for each in first["whole"]}
    assert whole["TopKV2"]["line"] == sort
    assert "rule" in whole["TopKV2"]["reason"]
    assert whole["EagerPyFunc"]["line"] == call
    assert "on the host" in whole["EagerPyFunc"]["reason"]


KERAS = """
import keras, numpy as np
x = np.ones((50, 8), "float32")
model = keras.Sequential([keras.layers.Dense(16), keras.layers.Dense(1)])
model.compile("adam", "mse", run_eagerly=False)
try:
    model.fit(x, x[:, :1], batch_size=20, epochs=100, verbose=2)
except Exception:
    raise SystemExit("the end is no error of the program")
"""


@pytest.mark.slow
def test_a_table_for_fit(cluster: Cluster, tmp_path: Path) -> None:
    (cluster.folder / "train.py").write_text(KERAS)
    file = cluster.folder / "cluster.yaml"
    file.write_text("command: python train.py\ntasks: {worker: 3}\n")
    done = cluster.command("explain", "cluster.yaml", timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("On 3 ranks:\n\nfunction")
    assert "gradient_tape/" in done.stdout
    assert "train.py:7:<module>" in done.stdout
    brief = cluster.command(
        *("explain", "-q", "-n", "2", "--set", "env.A=1", "cluster.yaml"),
        timeout_s=DEADLINE_S,
    )
    assert brief.stdout.startswith("On 2 ranks:\n")
    assert "gradient_tape/" not in brief.stdout


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        pytest.param(
            "import tensorflow as tf\ntf.ones(3) + 1\n",
            1,
            ["no tf.function ran"],
            marks=pytest.mark.slow,
        ),
        ("print('hi')\n", 1, ["hi", "nothing to divide: no tf.function ran"]),
        (
            "import sys\ndef f(): raise ValueError('mine')\nf()\n",
            1,
            ["in f\n", "ValueError: mine", "the program failed by itself"],
        ),
        ("import sys\nsys.exit(7)\n", 7, ["(exit code 7): nothing to explain"]),
        ("import os\nos.kill(os.getpid(), 9)\n", 137, ["(SIGKILL)"]),
    ],
)
def test_programs_without_an_answer(
    cluster: Cluster, program: str, code: int, said: Sequence[str]
) -> None:
    (cluster.folder / "train.py").write_text(program)
    done = cluster.command("explain", "--", "python", "train.py", timeout_s=DEADLINE_S)
    assert (done.returncode, done.stdout) == (code, "")
    for each in said:
        assert each in done.stderr
    assert "tfcluster/runtime" not in done.stderr


def test_usage(cluster: Cluster) -> None:
    (cluster.folder / "made.yaml").write_text(
        "command: python train.py\ntasks: {worker: 2}\nsetup: [module load x]\n"
    )
    for words, said in (
        ((), "nothing to explain"),
        (("-n", "1", "--", "python", "-c", "0"), "one rank divides nothing"),
        (("--", "python", "no.py"), "there is no no.py"),
        (("no.yaml",), "no.yaml: error: cannot read"),
        (("--", "true"), "begins with python"),
        (("made.yaml",), "does not run 'setup'"),
    ):
        done = cluster.command("explain", *words)
        assert done.returncode in (2, 4)
        assert said in done.stderr


PIPELINES = """
import keras, tensorflow as tf

def parsed(line):
    return tf.ensure_shape(tf.strings.to_number(tf.strings.split(line, ",")), [3])

lines = tf.data.Dataset.from_tensor_slices(["1,2,3"] * 16)

def evaluated(name, dataset):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)], name=name)
    model.compile("sgd", "mse")
    model.evaluate(dataset.map(lambda x: (x, x)).batch(8), verbose=0)

evaluated("divided", lines.map(parsed))
def noisy(x):
    return x + tf.random.normal(tf.shape(tf.where(x > 0))[:1])

evaluated("noisy", lines.map(parsed).map(noisy))

@tf.function
def step(batches):
    return tf.reduce_sum(next(batches))

step(iter(lines.map(parsed).batch(8)))
for batch in lines.map(parsed).batch(8):
    tf.reduce_sum(batch)
for batch in lines.map(parsed).cache().batch(8):
    tf.reduce_sum(batch)
keras.Sequential([keras.layers.Dense(1)]).predict(tf.ones((8, 3)), verbose=0)
"""


@pytest.mark.slow
def test_each_pipeline_with_why_it_is_whole(cluster: Cluster) -> None:
    found, _ = explained(cluster, PIPELINES, "-n", "2")
    pipelines = [
        each for function in found["functions"] for each in function["pipelines"]
    ]
    by_host = "the ranks of each host divide the batches"
    assert {"divided": True, "reason": None} in pipelines
    assert {"divided": True, "reason": by_host} in pipelines
    (reason,) = (each["reason"] for each in pipelines if not each["divided"])
    assert "draws random numbers" in reason
    first, second = found["loops"]
    assert (first["divided"], first["reason"]) == (True, by_host)
    line = PIPELINES.splitlines().index("for batch in lines.map(parsed).batch(8):") + 1
    assert first["line"].endswith(f"train.py:{line}")
    assert not second["divided"]
    assert "cache(...) comes between map() and batch()" in second["reason"]
