"""Scripts that were written for Horovod, with only the import line changed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kit.ranks import ROOT, Job, Jobs, Ranks
from tests.kit.tiers import some

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

EXAMPLES = {
    "horovod_keras.py": ("--epochs", "5"),
    "horovod_tape.py": ("--steps", "240"),
}
COMPRESSED = {"TFCLUSTER_RUNTIME": '{"compression": "fp16"}'}
DIGITS = (str(ROOT / "examples" / "digits.py"), "--epochs", "1")
TRAININGS = {
    "fit": ("cases/inputs.py", ("fit",)),
    "digits": ("final_weights.py", DIGITS),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("horovod")


@pytest.fixture(scope="module")
def jobs(folder: Path) -> Mapping[str, Ranks]:
    examples = [
        Job(f"{script}-{size}", size, str(ROOT / "examples" / script), words)
        for script, words in EXAMPLES.items()
        for size in (1, 2)
    ]
    trainings = [
        Job(f"{name}-{how}", 2, script, (str(folder / f"{name}-{how}"), *words), env)
        for name, (script, words) in TRAININGS.items()
        for how, env in (("plain", {}), ("fp16", COMPRESSED))
    ]
    late = Job("late", 2, "late_claims.py")
    return Jobs(folder, [*examples, *trainings, late], timeout_s=280)


def accuracy(output: str) -> float:
    (found,) = re.findall(r"validation loss \S+, accuracy (\S+)", output)
    return float(found)


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
@pytest.mark.parametrize("script", some(EXAMPLES, "horovod_tape.py"))
def test_examples_learn(jobs: Mapping[str, Ranks], script: str, size: int) -> None:
    ranks = jobs[f"{script}-{size}"]
    assert ranks.exit_codes == [0] * size, ranks.outputs
    assert accuracy(ranks.outputs[0]) > 0.8
    assert not any("validation loss" in output for output in ranks.outputs[1:])
    assert not any("warning: " in output for output in ranks.outputs)


def test_steps_are_divided_by_the_script_alone(jobs: Mapping[str, Ranks]) -> None:
    chief, _ = jobs["horovod_keras.py-2"].outputs
    assert "23/23" in chief
    assert "Epoch 2: the learning rate has warmed up to 0.002." in chief


@pytest.mark.exhaustive
def test_one_process_takes_all_steps(jobs: Mapping[str, Ranks]) -> None:
    assert "46/46" in jobs["horovod_keras.py-1"].outputs[0]


def test_only_rank_0_has_written(jobs: Mapping[str, Ranks]) -> None:
    written = {path.name for path in jobs["horovod_keras.py-2"].folder.iterdir()}
    assert written == {f"digits-{epoch}.weights.h5" for epoch in range(1, 6)}


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES)
def test_examples_run_under_the_launcher(script: str, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("TFCLUSTER_")}
    env["TFCLUSTER_STATE_DIR"] = str(tmp_path / "state")
    words = (sys.executable, str(ROOT / "examples" / script), *EXAMPLES[script])
    done = subprocess.run(
        [sys.executable, "-m", "tfcluster", "launch", "-n", "2", "--", *words],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert accuracy(done.stdout) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize(
    "training", ["fit", pytest.param("digits", marks=pytest.mark.exhaustive)]
)
def test_nothing_is_rounded_on_one_host(
    jobs: Mapping[str, Ranks], folder: Path, training: str
) -> None:
    """``compression`` rounds only between hosts: see ``test_several_hosts.py``."""
    for how in ("plain", "fp16"):
        ranks = jobs[f"{training}-{how}"]
        assert ranks.exit_codes == [0, 0], ranks.outputs
    plain = _weights(folder / f"{training}-plain-0.npz")
    found = [_weights(folder / f"{training}-fp16-{rank}.npz") for rank in range(2)]
    for key, value in found[0].items():
        np.testing.assert_array_equal(found[1][key], value, err_msg=key)
        np.testing.assert_array_equal(plain[key], value, err_msg=key)


def _weights(path: Path) -> dict[str, NDArray[Any]]:
    """The weights, without the other results of a case."""
    return {
        key: value
        for key, value in np.load(path).items()
        if not key.startswith("fit/") or key.startswith("fit/w")
    }


def test_claims_from_elsewhere_and_too_late(jobs: Mapping[str, Ranks]) -> None:
    ranks = jobs["late"]
    assert ranks.exit_codes == [0, 0], ranks.outputs
    for rank, output in enumerate(ranks.outputs):
        assert "rows of a step [4]" in output
        assert f"weights of rank {rank} are those of all" in output
        assert "too late: the program combines gradients" in output
