"""Tests of messages to the user: each appears once and names its source."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.kit.cluster import Cluster
from tests.kit.oracle import assert_nothing_left

NOWHERE = "no-such-host.invalid"
COUNT = (
    "--set",
    "runtime.strategy=none",
    "--",
    "bash",
    "-c",
    "echo rank $TFCLUSTER_RANK",
)


def test_a_success_ends_with_the_way_to_its_logs(cluster: Cluster) -> None:
    running = cluster.bash("echo said")
    assert running.end() == 0
    *_, last = running.err.splitlines()
    assert last == f"logs: {running.folder / 'logs'} (tfcluster logs {running.run})"
    assert cluster.command("logs", running.run).stdout == "said\n"


def test_status_says_the_cause_of_a_failure_once(cluster: Cluster) -> None:
    where = ("-n", "2", "--hosts", f"{NOWHERE}:2", "--set", "backend=ssh")
    running = cluster.start(*where, "--set", "runtime.strategy=none", "--", "true")
    assert running.end() == 3
    cause = f"the name {NOWHERE} does not resolve"
    assert running.err.count(cause) == 1
    said = cluster.command("status", running.run).stdout
    assert said.count(cause) == 1
    assert "reason:" not in said


def test_status_and_stop_of_a_run_that_was_stopped_say_so_once(
    cluster: Cluster,
) -> None:
    running = cluster.bash("echo up; sleep 60").up()
    stopped = cluster.command("stop", running.run)
    assert stopped.stderr.splitlines() == [f"{running.run}: stopped"]
    assert running.end() == 143
    said = cluster.command("status", running.run).stdout
    assert said.count("stop requested") == 1
    again = cluster.command("stop", running.run)
    assert again.stderr.splitlines() == [f"{running.run} has already ended (stopped)"]
    assert again.stdout == ""
    assert_nothing_left(running)


def test_the_error_about_too_few_gpus_shows_line_and_column(cluster: Cluster) -> None:
    cluster.environ["CUDA_VISIBLE_DEVICES"] = ""
    config = cluster.file(
        "command: python train.py\ntasks:\n  worker: {count: 2, gpus: 1}\n"
    )
    for words in (["plan", config], ["launch", config]):
        done = cluster.command(*words)
        assert done.returncode == 4
        assert "localhost: its tasks need 2 GPUs, but it has 0" in done.stderr
        assert f"lower 'gpus' ({config}:3:28)" in done.stderr
    assert cluster.run_ids() == []


def test_a_python_without_tensorflow_is_named(cluster: Cluster) -> None:
    """``python3`` in the command also means the configured interpreter."""
    bare = cluster.folder / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    (cluster.folder / "train.py").write_text("import tensorflow\n")
    config = cluster.file(
        f"python: {bare}\ncommand: python3 train.py\ntasks: {{worker: 2}}\n"
    )
    running = cluster.start(config)
    assert running.end() == 4
    assert f"{bare} cannot import TensorFlow" in running.err
    assert "No module named" in running.err
    assert "set 'python' to another interpreter" in running.err
    assert_nothing_left(running)


@pytest.mark.parametrize(
    ("tensorflow", "keras", "problem"),
    [
        ("2.15.1", "3.7.0", "TensorFlow 2.15.1 is too old: tfcluster needs TensorFlow"),
        (
            "2.16.2",
            "3.6.0",
            "Keras 3.6.0 is too old: tfcluster needs Keras 3.7 or newer",
        ),
    ],
)
def test_versions_that_are_too_old_are_refused_before_any_task_starts(
    cluster: Cluster, tensorflow: str, keras: str, problem: str
) -> None:
    for package, version in [("tensorflow", tensorflow), ("keras", keras)]:
        (cluster.folder / "old" / package).mkdir(parents=True)
        module = cluster.folder / "old" / package / "__init__.py"
        module.write_text(f"__version__ = {version!r}\n")
    old = cluster.folder / "old" / "python"
    folder = cluster.folder / "old"
    old.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    old.chmod(0o755)
    (cluster.folder / "train.py").write_text("import tensorflow\nprint('it runs')\n")
    config = cluster.file(
        f"python: {old}\ncommand: python train.py\ntasks: {{worker: 2}}\n"
    )
    running = cluster.start(config)
    assert running.end() == 4
    assert f"{old} has {problem}" in running.err
    assert "it runs" not in running.out
    assert_nothing_left(running)


NEW = """
__version__ = "99.0.1"
class random:
    set_seed = staticmethod(lambda seed: None)
"""


def test_versions_newer_than_the_tested_ones_are_reported_once(
    cluster: Cluster,
) -> None:
    folder = cluster.folder / "new"
    (folder / "tensorflow").mkdir(parents=True)
    (folder / "tensorflow" / "__init__.py").write_text(NEW)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (cluster.folder / "train.py").write_text("import tensorflow\nprint('it runs')\n")
    config = cluster.file(
        f"python: {python}\ncommand: python train.py\ntasks: {{worker: 2}}\n"
        "runtime: {warm_start: false}\n"
    )
    running = cluster.start(config)
    assert running.end() == 1, running.err  # It trains nothing, which is an error.
    warning = "TensorFlow 99.0.1 is newer than all that tfcluster was tested with"
    assert running.err.count(f"\nwarning: worker:0: {warning}") == 1
    assert f"worker:1: {warning}" not in running.err
    logs = [path.read_text() for path in cluster.folder.rglob("logs/worker-?.log")]
    assert sum(log.count(warning) for log in logs) == 1


WITHOUT_EFFECT = """
import keras, numpy as np, tensorflow as tf
with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)
"""


@pytest.mark.slow
@pytest.mark.tensorflow
def test_what_has_no_effect_is_warned_of_once(cluster: Cluster) -> None:
    """A script with its own one-replica strategy."""
    Path(cluster.folder / "train.py").write_text(WITHOUT_EFFECT)
    running = cluster.start("-n", "2", "--", "python", "train.py")
    assert running.end() == 0, running.err
    text = "MirroredStrategy has one replica and changes nothing"
    warned = [line for line in running.err.splitlines() if text in line]
    assert len(warned) == 1, running.err
    assert warned[0].startswith("warning: worker:")
    assert_nothing_left(running)


def test_quiet_shows_the_result_alone(cluster: Cluster) -> None:
    running = cluster.start("-q", "-n", "2", *COUNT)
    assert running.end() == 0
    assert running.out == ""
    lines = running.err.splitlines()
    kept = [line for line in lines if not line.startswith("warning: ")]
    assert [line.split(" ")[0] for line in kept] == [
        "task", "worker:0", "worker:1", "logs:"
    ]  # fmt: skip


def test_quiet_still_shows_a_failure(cluster: Cluster) -> None:
    command = ("--", "bash", "-c", "echo cause; exit 33")
    running = cluster.start("-q", "-n", "1", *COUNT[:2], *command)
    assert running.end() == 33
    assert "first failure: worker:0" in running.err
    assert "| cause" in running.err


def test_lines_are_shown_with_their_time(cluster: Cluster) -> None:
    words = ("--timestamps", "-n", "1", *COUNT)
    running = cluster.start(*words)
    assert running.end() == 0
    stamp = r"\d\d:\d\d:\d\d\.\d{3} "
    assert re.fullmatch(f"{stamp}worker:0 \\| rank 0\n", running.out)


def test_quiet_checks_show_problems_alone(cluster: Cluster) -> None:
    config = cluster.file("command: python nosuch.py\ntasks: {worker: 2}\n")
    planned = cluster.command("plan", "-q", config)
    assert (planned.returncode, planned.stdout) == (0, "")
    assert "there is no nosuch.py" in planned.stderr
    checked = cluster.command("doctor", "-q", "--quick", config)
    assert (checked.returncode, checked.stdout) == (4, "")
    assert "nosuch.py" in checked.stderr


def test_verbose_doctor_shows_all_facts(cluster: Cluster) -> None:
    (cluster.folder / "train.py").touch()
    config = cluster.file("command: python train.py\ntasks: {worker: 2}\n")
    done = cluster.command("doctor", "-v", "--quick", config)
    assert f"  executable: {sys.executable}\n" in done.stdout
    assert "  limits: open files: " in done.stdout
    assert "no problems found" in done.stderr
