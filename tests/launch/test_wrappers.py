"""Tests of commands that are not Python scripts, and programs that train in a child."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.cluster import Cluster, Running
from tests.kit.oracle import assert_nothing_left

RANKS = """\
#!/usr/bin/env python
import tfcluster.runtime as tfc
tfc.init()
print("ranks", tfc.allgather_object(tfc.rank()), flush=True)
"""
"""Needs the agent, the other rank, and an import that only works in a launch."""

CHILDREN = """\
import multiprocessing, runpy, sys
def child():
    runpy.run_path("ranks.py", run_name="__main__")
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    process = context.Process(target=child)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""
SUBPROCESS = (
    "import subprocess, sys; sys.exit(subprocess.call([sys.executable, 'ranks.py']))"
)
TWICE = """\
import subprocess, sys
import tfcluster.runtime as tfc
tfc.init()
tfc.barrier()
sys.exit(subprocess.call([sys.executable, "ranks.py"]))
"""


def launched(cluster: Cluster, *command: str, options: tuple[str, ...] = ()) -> Running:
    """Launch two ranks of a command that may use these scripts."""
    for name, text in {
        "ranks.py": RANKS,
        "children.py": CHILDREN,
        "twice.py": TWICE,
        "train.sh": "echo starting\npython ranks.py\n",
        "twice.sh": "python ranks.py && python ranks.py\n",
    }.items():
        (cluster.folder / name).write_text(text)
        (cluster.folder / name).chmod(0o755)
    path = f"{Path(sys.executable).parent}:{cluster.environ['PATH']}"
    return cluster.start(*("-n", "2", *options, "--", *command), environ={"PATH": path})


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["bash", "train.sh"], id="a shell script"),
        pytest.param(["bash", "-c", "exec python ranks.py"], id="bash -c"),
        pytest.param(["./ranks.py"], id="a script with #!"),
        pytest.param(["nice", "env", "A=1", "./ranks.py"], id="nice and env"),
        pytest.param(["python", "-c", SUBPROCESS], id="a subprocess"),
        pytest.param(["python", "children.py", "spawn"], id="spawn"),
        pytest.param(["python", "children.py", "fork"], id="fork"),
        pytest.param(["python", "children.py", "forkserver"], id="forkserver"),
    ],
)
def test_the_runtime_reaches_any_python_below_the_command(
    cluster: Cluster, command: list[str]
) -> None:
    running = launched(cluster, *command)
    assert running.end() == 0, running.out + running.err
    for task in ("worker:0", "worker:1"):
        assert "ranks [0, 1]" in running.text(task)
    assert_nothing_left(running)


FITS = """\
import keras, numpy as np
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)
print("steps", int(model.optimizer.iterations), flush=True)
"""


def environment_without_us(folder: Path) -> Path:
    """An environment with the packages of this one but tfcluster; its Python."""
    words = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(words, check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    found = importlib.util.find_spec("tensorflow")
    assert found is not None
    assert found.origin is not None
    for entry in Path(found.origin).parents[1].iterdir():
        if entry.suffix != ".pth" and "tfcluster" not in entry.name:
            (packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


@pytest.mark.slow
@pytest.mark.tensorflow
def test_the_runtime_reaches_an_environment_without_it(cluster: Cluster) -> None:
    python = environment_without_us(cluster.folder / "other")
    (cluster.folder / "train.py").write_text(FITS)
    running = launched(cluster, "bash", "-c", f"exec {python} train.py")
    assert running.end(120) == 0, running.out + running.err
    for task in ("worker:0", "worker:1"):
        assert "steps 1" in running.text(task)


@pytest.mark.parametrize("program", ["uv", "conda"])
def test_runners_of_environments_hand_it_on(cluster: Cluster, program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program} on this machine")
    words = {
        "uv": ("uv", "run", "--no-project", "--python", sys.executable, "python"),
        "conda": ("conda", "run", "--no-capture-output", sys.executable),
    }
    running = launched(cluster, *words[program], "ranks.py")
    assert running.end() == 0, running.out + running.err
    assert "ranks [0, 1]" in running.text("worker:0")


def test_processes_may_have_the_rank_one_after_the_other(cluster: Cluster) -> None:
    running = launched(cluster, "bash", "twice.sh")
    assert running.end() == 0, running.out + running.err
    assert running.text("worker:1").count("ranks [0, 1]") == 2


@pytest.mark.slow
def test_two_processes_that_train_at_one_time_are_named(cluster: Cluster) -> None:
    running = launched(cluster, "python", "twice.py")
    assert running.end() == 1
    cause = running.report()["first_failure"]["cause"]
    assert "ranks.py) cannot train: process" in cause
    assert "twice.py)" in cause


def test_a_task_that_exchanges_nothing_has_failed(cluster: Cluster) -> None:
    running = launched(cluster, "bash", "-c", "echo done")
    assert running.end() == 1
    failure = running.report()["first_failure"]
    assert failure["exit_code"] == 0
    assert "strategy: none" in failure["cause"]
    assert "strategy: none" in running.err
    allowed = ("--set", "runtime.require_exchange=false")
    assert launched(cluster, "bash", "-c", "echo done", options=allowed).end() == 0
    alone = cluster.start("-n", "1", "--", "bash", "-c", "echo done")
    assert alone.end() == 0


def test_a_python_that_is_kept_from_the_runtime_is_noticed(cluster: Cluster) -> None:
    code = "import sys; print('site' in sys.modules)"
    running = launched(cluster, "bash", "-c", f'python -I -c "{code}"')
    assert running.end() == 1
    assert "require_exchange" in running.report()["first_failure"]["cause"]


@pytest.mark.slow
def test_a_wrapped_program_without_progress_ends_the_run(cluster: Cluster) -> None:
    options = ("--set", "progress_timeout=1s")
    running = launched(cluster, "bash", "-c", "sleep 60; :", options=options)
    assert running.end() == 6


def test_the_sites_own_customisation_goes_on(cluster: Cluster) -> None:
    site = cluster.folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import sys; sys.customised = True\n")
    code = (
        "import sys, os; print(sys.customised, "
        "[p for p in sys.path if p.endswith('runtime/site')], "
        "'numpy' in sys.modules, 'random' in sys.modules)"
    )
    allowed = ("--set", "runtime.require_exchange=false")
    options = (*allowed, "--set", f"env.PYTHONPATH={site}")
    running = launched(cluster, "bash", "-c", f'python -c "{code}"', options=options)
    assert running.end() == 0, running.err
    assert running.text("worker:0") == "True [] False False\n"


TRAINS = """\
import keras
import numpy as np
def train():
    x = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
    keras.utils.set_random_seed(1)
    layers = [keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    losses = model.fit(x, x.sum(1), batch_size=16, epochs=2, verbose=0).history["loss"]
    print("losses", *(f"{loss:.5f}" for loss in losses), flush=True)
if __name__ == "__main__":
    train()
"""


@pytest.mark.exhaustive
@pytest.mark.tensorflow
def test_keras_below_a_shell_script_trains_as_on_one_machine(cluster: Cluster) -> None:
    (cluster.folder / "keras_train.py").write_text(TRAINS)
    alone = cluster.start("-n", "1", "--", "python", "keras_train.py")
    assert alone.end(100) == 0, alone.out
    running = launched(cluster, "bash", "-c", "python keras_train.py; exit $?")
    assert running.end(200) == 0, running.out
    (expected,) = (x for x in alone.text("worker:0").splitlines() if "losses" in x)
    for task in ("worker:0", "worker:1"):
        assert expected in running.text(task)
    assert running.status()["tasks"][0]["step"] is not None
