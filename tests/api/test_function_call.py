"""Functions that ranks call for a Python program."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import tfcluster
from tests.kit.cluster import DEADLINE_S, Cluster
from tfcluster.api.function_call import locate

MODULE = """
import os, time

def where(*args, **kwargs):
    print("called", flush=True)
    return [args, kwargs, int(os.environ["TFCLUSTER_RANK"]), os.getcwd()]

def fails(text):
    if os.environ["TFCLUSTER_RANK"] == "1":
        raise ValueError(text)
    time.sleep(60)

def returns_a_module():
    return {"where": [time]}

def starts_a_process():
    import multiprocessing
    process = multiprocessing.get_context("spawn").Process(target=where)
    process.start()
    process.join()
    return process.exitcode

def leaves():
    os._exit(0)

def outer():
    def inner(): ...
    return inner

class Trainer:
    def fit(self): ...

unnamed = lambda: 1
def twice(): ...
first = twice
def twice(): ...
"""
TRAINS = """
import numpy as np
import keras

def train(epochs):
    keras.utils.set_random_seed(1)
    x = np.random.normal(size=(64, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(x, x[:, :1], epochs=epochs, batch_size=16, verbose=0)
    return {"loss": history.history["loss"], "weights": model.get_weights()}

if __name__ == "__main__":
    print(train(2)["loss"])
"""
SCRIPT = """
import sys, tfcluster

def double(a):
    return 2 * a

if __name__ == "__main__" or len(sys.argv) > 1:
    print(tfcluster.run(double, (1, 2)))
"""


@pytest.fixture
def work(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (cluster.folder / "api_work.py").write_text(MODULE)
    monkeypatch.chdir(cluster.folder)
    monkeypatch.syspath_prepend(str(cluster.folder))
    yield importlib.import_module("api_work")
    del sys.modules["api_work"]


def _left(cluster: Cluster) -> list[str]:
    return [path.name for path in (cluster.state / "calls").iterdir()]


def test_ranks_call_a_function(
    cluster: Cluster, work: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    array = np.arange(3, dtype=np.float32)
    call = functools.partial(
        tfcluster.run, work.where, environ=cluster.environ, workers=2
    )
    args, kwargs, rank, folder = call(array, b"x", key=(1, None), echo=True)
    assert args[0].dtype == np.float32
    assert (args[0] == array).all()
    assert args[1:] == (b"x",)
    assert kwargs == {"key": (1, None)}
    assert (rank, folder) == (0, str(cluster.folder))
    printed = sorted(capsys.readouterr().out.splitlines())
    assert printed == ["worker:0 called", "worker:1 called"]
    results = call(args=[1], kwargs={"workers": 3}, all_results=True, name="two")
    here = str(cluster.folder)
    wanted = [[(1,), {"workers": 3}, rank, here] for rank in range(2)]
    assert results == wanted
    names = {run.partition("-")[0] for run in cluster.run_ids()}
    assert names == {"where", "two"}
    assert _left(cluster) == []


@pytest.mark.slow
def test_an_error_of_a_rank_is_the_first_failure(
    cluster: Cluster, work: ModuleType
) -> None:
    with pytest.raises(tfcluster.RunFailedError) as caught:
        tfcluster.run(work.fails, "bad data", environ=cluster.environ)
    first = caught.value.outcome.first_failure
    assert first is not None
    assert (first["task"], first["cause"]) == ("worker:1", "ValueError: bad data")
    assert "worker:1 on localhost: ValueError: bad data\n" in caught.value.message
    assert "raise ValueError(text)" in caught.value.message
    assert "rank_program.py" not in caught.value.message
    assert "call.py" not in caught.value.message
    assert _left(cluster) == []


@pytest.mark.slow
def test_a_function_may_start_processes(
    cluster: Cluster, work: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    call = functools.partial(tfcluster.run, environ=cluster.environ, workers=1)
    assert call(work.starts_a_process, echo=True) == 0
    assert capsys.readouterr().out == "worker:0 called\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "returns_a_module",
            r"TypeError: result\['where'\]\[0\] is a module; what can",
        ),
        ("leaves", "has left no result"),
    ],
)
def test_a_result_that_cannot_be_had(
    cluster: Cluster, work: ModuleType, name: str, words: str
) -> None:
    with pytest.raises(tfcluster.TfclusterError, match=words):
        tfcluster.run(getattr(work, name), workers=1, environ=cluster.environ)


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (lambda work: work.unnamed, "is a lambda: .*put it into a module"),
        (lambda work: work.outer(), "is defined within a function"),
        (lambda work: work.Trainer().fit, "is not a function of a module"),
        (lambda work: work.first, "is not what the name twice means in api_work"),
        (lambda work: functools.partial(work.where, 1), "partial: .*is not a function"),
        (lambda work: work.Trainer(), "Trainer: .*is not a function"),
    ],
)
def test_functions_that_ranks_cannot_import(
    work: ModuleType, choose: Callable[[Any], Any], words: str
) -> None:
    with pytest.raises(tfcluster.ConfigError, match=words):
        tfcluster.run(choose(work))


def test_arguments_are_checked_before_anything_starts(
    cluster: Cluster, work: ModuleType
) -> None:
    run: Any = functools.partial(tfcluster.run, environ=cluster.environ)
    with pytest.raises(tfcluster.ConfigError, match=r"arguments are fails\(text\)"):
        run(work.fails, "a", worker=3)
    with pytest.raises(TypeError, match=r"args\[0\]\['model'\] is an object"):
        run(work.where, {"model": object()})
    with pytest.raises(TypeError, match=r"kwargs\['model'\] is an object"):
        run(work.where, model=object())
    with pytest.raises(tfcluster.ConfigError, match="also given as arguments"):
        run(work.where, 1, args=(2,))
    with pytest.raises(tfcluster.ConfigError, match="has key, also given as"):
        run(work.where, kwargs={"key": 1}, key=2)
    assert cluster.run_ids() == []


def _script(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    (cluster.folder / "script.py").write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, *words],
        cwd=cluster.folder,
        env=cluster.environ,
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,  # two ranks import TensorFlow
        check=False,
    )


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("script.py",), marks=pytest.mark.slow),
        pytest.param(("-m", "script"), marks=pytest.mark.exhaustive),
    ],
)
def test_a_function_of_the_script_itself(
    cluster: Cluster, words: tuple[str, ...]
) -> None:
    done = _script(cluster, *words)
    assert done.stdout == "(1, 2, 1, 2)\n", done.stderr


@pytest.mark.slow
def test_a_script_without_a_guard_does_not_launch_for_ever(cluster: Cluster) -> None:
    (cluster.folder / "unguarded.py").write_text(
        SCRIPT.partition("if __")[0] + ("print(tfcluster.run(double, 1))\n")
    )
    done = _script(cluster, "unguarded.py")
    assert done.returncode == 1
    assert "a rank that imports this script would launch again" in done.stderr
    assert 'put the launch under `if __name__ == "__main__":`' in done.stderr
    assert len(cluster.run_ids()) == 1


def test_a_function_that_was_typed_in(cluster: Cluster) -> None:
    done = _script(cluster, "-c", "import tfcluster\ndef f(): ...\ntfcluster.run(f)\n")
    assert done.returncode == 1
    assert "is defined in a notebook cell or typed in" in done.stderr
    assert "%%writefile train.py" in done.stderr


def test_modules_of_packages_are_found_from_above() -> None:
    source = locate(locate)
    assert source.module == "tfcluster.api.function_call"
    assert source.file is not None
    assert source.path == (source.file.partition("/tfcluster/api/")[0],)


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_function_trains_as_one_machine_does(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cluster.folder / "api_trains.py").write_text(TRAINS)
    program = (
        "import api_trains, tfcluster, numpy as np\n"
        "results = tfcluster.run(api_trains.train, 2, all_results=True)\n"
        "print(results[0]['loss'])\n"
        "for one, other in zip(*(each['weights'] for each in results)):\n"
        "    assert (one == other).all()\n"
    )
    done = _script(cluster, "-c", program)
    alone = _script(cluster, "api_trains.py")
    found, wanted = (
        [float(word) for word in each.stdout.strip(" []\n").split(",")]
        for each in (done, alone)
    )
    assert found == pytest.approx(wanted, rel=1e-5), done.stderr
