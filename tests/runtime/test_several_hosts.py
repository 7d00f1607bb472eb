"""Trainings whose ranks are on several hosts, also with rounded gradients.

Ranks are processes with TensorFlow; each counts as a host of its own.
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from tests.kit.ranks import Job, Jobs
from tests.kit.written import Values, Written

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

CASES = ("fit", "normalized", "several_steps", "tape")
LOOPS = ("divided_loops", "errors_in_loops", "loops_that_differ")
SEVERAL = {"HOSTS": "several", "TFCLUSTER_STRATEGY": "collective"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("hosts")

    def job(name: str, size: int, env: dict[str, str], *cases: str) -> Job:
        return Job(name, size, "several_hosts.py", (str(folder / name), *cases), env)

    def rounded(**options: object) -> dict[str, str]:
        return {**SEVERAL, "TFCLUSTER_RUNTIME": json.dumps(options)}

    feedback = rounded(compression="fp16", error_feedback=True)
    jobs = [
        job("alone", 1, {"TFCLUSTER_STRATEGY": "none"}, *CASES, *LOOPS),
        job("several", 2, SEVERAL, *CASES),
        job("pairs", 4, {**SEVERAL, "HOSTS": "pairs"}, *LOOPS),
        job("three", 3, SEVERAL, "fit"),
        job("bf16", 2, rounded(compression="bf16"), "fit"),
        job("feedback", 2, feedback, "fit"),
        job("mismatch", 2, SEVERAL, "mismatch"),
        job("dies", 2, {**SEVERAL, "DIES": "1"}, "fit"),
    ]
    return Written(folder, Jobs(folder, jobs, timeout_s=200))


def assert_near(ranks: list[Values], alone: Values, tolerance: float) -> None:
    """Weights are within a fraction of the largest, and equal on all ranks."""
    for key in alone:
        for rank in ranks[1:]:
            np.testing.assert_array_equal(rank[key], ranks[0][key])
        atol = tolerance * np.abs(alone[key]).max()
        np.testing.assert_allclose(ranks[0][key], alone[key], rtol=0, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_it_equals_one_process(found: Written, case: str) -> None:
    assert_near(found.of("several", case), found.by(0, "alone", case), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("case", LOOPS)
def test_ranks_of_a_host_divide_what_loops_read(found: Written, case: str) -> None:
    assert_near(found.of("pairs", case), found.by(0, "alone", case), 1e-5)


@pytest.mark.slow
def test_three_hosts_of_which_two_may_have_no_row(found: Written) -> None:
    assert_near(found.of("three", "fit"), found.by(0, "alone", "fit"), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "job", ["bf16", pytest.param("feedback", marks=pytest.mark.exhaustive)]
)
def test_rounded_gradients_train_nearly_the_same(found: Written, job: str) -> None:
    ranks, alone = found.of(job, "fit"), found.by(0, "alone", "fit")
    assert_near(ranks, alone, 2e-2)
    exact = found.by(0, "several", "fit")
    assert not np.array_equal(ranks[0]["w2"], exact["w2"]), "nothing was rounded"


def test_another_model_is_named_on_every_rank(found: Written) -> None:
    here, there = (each["raised"] for each in found.of("mismatch", "mismatch"))
    for text in (str(here), str(there)):
        assert "CollectiveMismatchError" in text
        assert "the ranks have different" in text


def test_a_rank_that_dies_within_an_exchange_is_named(found: Written) -> None:
    ended = found.jobs["dies"]
    assert ended.exit_codes[1] == -9
    said = ended.outputs[0]
    assert re.search(
        r"PeerLostError: rank 1 has left: .*\(in exchange \d+: exchange \d+ of ", said
    )
