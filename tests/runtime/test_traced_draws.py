"""Ranks trace Keras's first step once, and tell of numbers drawn while they trace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.runtime.ranks import Job, Jobs, Ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]

DEEDS = ("plain", "scaled", "loss", "numpy", "python", "keras")
WARNING = "draws random numbers of Python or numpy"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traced-draws")


@pytest.fixture(scope="module")
def jobs(folder: Path) -> Mapping[str, Ranks]:
    found = [
        Job(
            f"{deed}-{size}",
            size,
            "traced_draws.py",
            (deed, str(folder / f"{deed}-{size}.npz")),
        )
        for deed in DEEDS
        for size in (1, 2)
    ]
    return Jobs(folder, found, timeout_s=100, must_succeed=True)


def traces(ranks: Ranks) -> int:
    (line,) = (line for line in ranks.outputs[0].splitlines() if line.startswith("{"))
    return int(json.loads(line)["traces"])


def test_the_first_step_is_traced_once(jobs: Mapping[str, Ranks], folder: Path) -> None:
    """The variables of the optimizer and of metrics are no reason to trace again."""
    assert (traces(jobs["plain-1"]), traces(jobs["plain-2"])) == (2, 1)
    assert_equal(folder, "plain")


def test_a_scaled_loss_is_traced_as_in_one_process(
    jobs: Mapping[str, Ranks], folder: Path
) -> None:
    """In the first trace Keras scales by a constant, since nothing is built yet."""
    assert (traces(jobs["scaled-1"]), traces(jobs["scaled-2"])) == (2, 2)
    assert_equal(folder, "scaled")


def test_seeds_that_keras_draws_are_no_reason_to_warn(
    jobs: Mapping[str, Ranks], folder: Path
) -> None:
    assert WARNING not in jobs["keras-2"].outputs[0]
    assert jobs["keras-1"]
    assert_equal(folder, "keras")


@pytest.mark.parametrize("deed", ["numpy", "python", "loss"])
def test_a_step_that_draws_in_every_trace_is_pointed_out(
    jobs: Mapping[str, Ranks], deed: str
) -> None:
    assert jobs[f"{deed}-2"].outputs[0].count(WARNING) == 1


def assert_equal(folder: Path, deed: str) -> None:
    with (
        np.load(folder / f"{deed}-1.npz") as alone,
        np.load(folder / f"{deed}-2.npz") as ranks,
    ):
        assert set(alone) == set(ranks)
        for name in alone:
            np.testing.assert_allclose(ranks[name], alone[name], rtol=1e-5, atol=1e-6)
