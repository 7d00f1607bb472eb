"""Keras programs with parameter servers: synchronous, replicated and asynchronous.

All cases run in a few jobs; a job runs when a test first needs its results.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.config.files import loaded, problems
from tests.kit.ranks import Job, Jobs
from tests.kit.written import Written
from tests.runtime.keras_checks import (
    EQUAL,
    assert_equal_on_all_ranks,
    assert_equal_to_one,
)
from tests.runtime.keras_jobs import CASES, Outcomes, Tier

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

SYNCHRONOUS = {
    "TFCLUSTER_STRATEGY": "parameter_server",
    "TFCLUSTER_RUNTIME": '{"synchronous": true}',
}
REPLICATED = {"TFCLUSTER_STRATEGY": "replicated"}
ALONE = {"TFCLUSTER_STRATEGY": "parameter_server"}

IN_STEP = [
    "averaged_weights",
    "averages_swapped_in",
    "averages_swapped_in_by_epochs",
    "built_in_the_first_step",
    "clipped",
    "embedding",
    "frozen",
    "gan",
    "goes_on_from_a_checkpoint",
    "overflow",
    "positions",
    "reduced_rate",
    "restored",
    "segments",
    "tape_builds_its_model",
    "tape_graph",
]
COPIED = [
    "clipped_by_global_norm_in_a_graph",
    "early_stopping",
    "fit",
    "schedule",
    "step_that_clips",
]
"""The most telling ``programs/cases``; TFCLUSTER_TEST_ALL_SIZES=1 runs all."""
if os.environ.get("TFCLUSTER_TEST_ALL_SIZES") == "1":
    IN_STEP = COPIED = EQUAL
IN_DEFAULT_TIER = {"built_in_the_first_step"}
VARIANTS = {
    *("averages_swapped_in", "averages_swapped_in_by_epochs", "averaged_weights"),
    *("gan", "restored", "frozen", "schedule", "early_stopping"),
    *("clipped", "goes_on_from_a_checkpoint", "overflow", "reduced_rate"),
    *("segments", "step_that_clips"),
}
"""Cases of the exhaustive tier; those that are in neither are slow."""
ASYNCHRONOUS = {
    "alone": (
        *("sums", "parts", "uneven", "not_finite", "rows", "loop", "saved"),
        *("late", "chief_first"),
    ),
    # Cases of slow tests.
    "more-alone": (
        *("clipped", "fewer_batches_than_ranks", "one_batch_unforeseen", "frozen"),
        *("unused", "on_batch", "stopped", "rate", "averaged", "wrong"),
    ),
}
HALF_PRECISION = {"mixed_precision": 0.02, "overflow": 0.02}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("parameter-server")

    def job(
        name: str, size: int, script: str, env: Mapping[str, str], *args: str
    ) -> Job:
        words = (str(folder / name), *args)
        return Job(name, size, script, words, env, servers=2)

    jobs = [
        job("steps", 2, "ps_synchronous.py", REPLICATED),
        job("assigned", 2, "ps_assigned.py", SYNCHRONOUS),
        Job("assigned-one", 1, "ps_assigned.py", (str(folder / "assigned-one"),)),
    ]
    jobs += [
        job(name, 2, "ps_asynchronous.py", ALONE, *cases)
        for name, cases in ASYNCHRONOUS.items()
    ]
    for name, size, env, cases in (
        ("synchronous", 2, SYNCHRONOUS, IN_STEP),
        ("replicated", 3, REPLICATED, COPIED),
    ):
        of_jobs: dict[str, list[str]] = {}
        for case in sorted(cases):
            of_jobs.setdefault(_job_of(name, case), []).append(case)
        for full_name, chosen in of_jobs.items():
            script = f"cases/{CASES[chosen[0]][0]}.py"
            jobs.append(job(full_name, size, script, env, *chosen))
    return Written(folder, Jobs(folder, jobs, timeout_s=570))


def _job_of(name: str, case: str) -> str:
    """The job that runs a case: there is one for each theme in each tier."""
    return f"{_tier_of(case).value}-{name}-{CASES[case][0]}"


def _tier_of(case: str) -> Tier:
    if case in IN_DEFAULT_TIER:
        return Tier.DEFAULT
    return Tier.EXHAUSTIVE if case in VARIANTS else Tier.SLOW


def of_tiers(cases: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "case", [pytest.param(case, marks=_tier_of(case).marks) for case in cases]
    )


# --- synchronous ----------------------------------------------------------------------


@of_tiers(IN_STEP)
def test_in_step_it_is_as_on_one_machine(
    found: Written, outcomes: Outcomes, case: str
) -> None:
    _compare(found, "synchronous", outcomes, case)


@of_tiers(COPIED)
def test_replicated_it_is_as_on_one_machine(
    found: Written, outcomes: Outcomes, case: str
) -> None:
    _compare(found, "replicated", outcomes, case)


def _compare(found: Written, job: str, outcomes: Outcomes, case: str) -> None:
    ranks = found.of(_job_of(job, case), case)
    one = outcomes.alone(case)
    assert_equal_on_all_ranks(ranks)
    assert_equal_to_one(one, ranks[0], tolerance=HALF_PRECISION.get(case))


def test_in_step_the_mean_is_applied(found: Written) -> None:
    for values in found.of("steps", "mean"):
        np.testing.assert_allclose(values["w0"], [1 - 0.1 * 3], rtol=1e-6)


def test_after_each_step_all_have_what_the_servers_have(found: Written) -> None:
    ranks = found.of("steps", "steps")
    for values in ranks:
        assert len(values["differences"]) == 13
        assert not values["differences"].any()
    trained = ["w0", "w1", "w2", "w3"]
    for name in trained:
        np.testing.assert_array_equal(ranks[0][name], ranks[1][name])


def test_a_step_is_one_push_and_nothing_is_read_besides(
    found: Written,
) -> None:
    """A push is answered once all ranks have pushed: one barrier for all variables."""
    for values in found.of("steps", "steps"):
        assert set(values["verbs"]) == {"push"}
        assert set(values["talks"]) == {1}


def test_another_layer_on_a_rank_is_named(found: Written) -> None:
    for values in found.of("steps", "wrong"):
        text = str(values["error_text"])
        assert text.startswith("CollectiveMismatchError")
        assert "layer0" in text
        assert "layer1" in text


def test_moving_averages_are_those_of_all_rows(found: Written) -> None:
    chief, other = found.of("steps", "averages")
    for ours, theirs in zip(chief["own"], other["own"], strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("job", ["steps", "alone"])
def test_the_mean_over_the_parts_of_a_batch_is_used(found: Written, job: str) -> None:
    ranks = found.of(job, "parts")
    # Asynchronously the chief waits for nobody; only rank 1 ends with all updates.
    for values in ranks[1:] if job == "alone" else ranks:
        np.testing.assert_allclose(values["w0"], [1 - 0.1 * (2 + 7) / 2], rtol=1e-6)


def test_an_optimizer_of_the_programs_own_is_applied_there(found: Written) -> None:
    for values in found.of("steps", "own_optimizer"):
        np.testing.assert_allclose(values["sum"], [0.25 * 1 + 1], rtol=1e-6)
        np.testing.assert_allclose(values["w0"], [1 - 0.1 - 0.125], rtol=1e-6)


def test_what_the_program_assigns_reaches_the_servers(found: Written) -> None:
    for values in found.of("steps", "assigned"):
        np.testing.assert_allclose(values["w0"], [5.0 - 1.0], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["eagerly", "in_graphs", "of_tensorflow", "rows"])
def test_whatever_is_assigned_is_as_on_one_machine(found: Written, case: str) -> None:
    (one,) = found.of("assigned-one", case)
    ranks = found.of("assigned", case)
    assert_equal_on_all_ranks(ranks)
    assert_equal_to_one(one, ranks[0])


# --- asynchronous ---------------------------------------------------------------------


def _asynchronous(case: str, weight: float, meaning: str) -> Any:
    marks = () if case in ASYNCHRONOUS["alone"] else (pytest.mark.slow,)
    return pytest.param(case, [weight], id=meaning, marks=marks)


@pytest.mark.parametrize(
    ("case", "weights"),
    [
        _asynchronous("sums", 1 - 0.1 * (1 + 2 + 3 + 4), "each batch once"),
        _asynchronous("clipped", 1 - 0.1 * (1 + 1.5), "a rank's own is clipped"),
        _asynchronous("fewer_batches_than_ranks", 1 - 0.1 * 3 * 2.0, "one batch"),
        _asynchronous("one_batch_unforeseen", 1 - 0.1 * 2 * 2.0, "no end told"),
        _asynchronous("uneven", 1 - 0.1 * (1 + 2.5 + 4), "uneven batches"),
        _asynchronous("not_finite", 1 - 0.1 * 2, "infinity"),
        _asynchronous("saved", 1 - 0.1 - 0.15, "saved"),
        _asynchronous("rate", 1 - 0.1 * 2, "the chief's learning rate"),
        _asynchronous("late", 1.0, "late"),
    ],
)
def test_asynchronous_gradients_add_up(
    found: Written, case: str, weights: list[float]
) -> None:
    job = "alone" if case in ASYNCHRONOUS["alone"] else "more-alone"
    for values in found.of(job, case):
        np.testing.assert_allclose(values["w0"], weights, atol=1e-6)


@pytest.mark.slow
def test_alone_what_is_not_trained_stays(found: Written) -> None:
    frozen, unused = (
        found.by(1, "more-alone", "frozen"),
        found.by(1, "more-alone", "unused"),
    )
    assert frozen["w0"] == [2.0]
    np.testing.assert_allclose(frozen["w1"], [1 - 0.1 * 2 * 3], rtol=1e-6)
    np.testing.assert_allclose(unused["w0"], [1 - 0.1 * 3], rtol=1e-6)
    assert unused["w1"] == [1.0]


def test_alone_only_rows_travel(found: Written) -> None:
    for values in found.of("alone", "rows"):
        # Bytes sent and received in two steps of a rank; the table has 640,000 bytes.
        assert len(values["moved"]) == 2
        assert values["moved"].max() < 1000
    rows = found.by(1, "alone", "rows")["table"]
    np.testing.assert_array_equal(rows, -8 * np.array([1, 2, 2, 1, 1, 1, 0]))


def test_alone_a_loop_gets_its_batches(found: Written) -> None:
    chief, other = found.of("alone", "loop")
    assert chief["first"].tolist() == [0, 2, 4, 6]
    assert other["first"].tolist() == [0, 1, 3, 5, 7]
    assert chief["second"].tolist() == [0, 2, 4, 6]
    assert other["second"].tolist() == [1, 3, 5, 7]
    assert chief["other"].tolist() == other["other"].tolist() == list(range(8))
    for values in (chief, other):
        # Both have taken the first batch of the first pass.
        expected = 1 - 0.1 * np.array([3, 2, 2, 2, 2, 2, 2, 2])
        np.testing.assert_allclose(values["weights"], expected, rtol=1e-6)


@pytest.mark.slow
def test_alone_calls_of_train_on_batch_are_distributed_round_robin(
    found: Written,
) -> None:
    chief, other = found.of("more-alone", "on_batch")
    # All ranks take the first call.
    assert [int(values["steps"]) for values in (chief, other)] == [2, 3]


def test_alone_the_chief_writes_what_the_servers_have(found: Written) -> None:
    for values in found.of("alone", "saved"):
        np.testing.assert_allclose(values["momentum"], [-0.15], rtol=1e-6)
    assert "done" in found.jobs["alone"].outputs[0]


@pytest.mark.slow
def test_alone_the_chief_says_when_it_is_enough(found: Written) -> None:
    chief, other = found.of("more-alone", "stopped")
    assert chief["epochs"] == 3
    assert other["epochs"] < 100_000


@pytest.mark.slow
def test_alone_averaged_weights_are_those_of_the_servers(found: Written) -> None:
    for values in found.of("more-alone", "averaged"):
        np.testing.assert_allclose(values["w0"], [(0.9 + 0.8) / 2], rtol=1e-6)


def test_alone_all_ranks_end_with_the_gradients_of_all_ranks(found: Written) -> None:
    chief, other = found.of("alone", "chief_first")
    for values in (chief, other):
        np.testing.assert_allclose(values["w0"], [0.0], atol=1e-6)
        np.testing.assert_allclose(values["seen"], [[0.0]], atol=1e-6)
    assert chief["w0"].tobytes() == other["w0"].tobytes()


def test_a_late_rank_begins_with_the_servers_weights(found: Written) -> None:
    late = found.by(1, "alone", "late")
    assert late["w0"] == [1.0]  # Its own weight would have been 2.
    assert late["loss"] == 1.0  # The loss of its first step.


@pytest.mark.slow
def test_asynchronous_another_layer_is_named(found: Written) -> None:
    texts = [str(values["error_text"]) for values in found.of("more-alone", "wrong")]
    # The rank that came first defines the model, so only the other fails.
    (text,) = [text for text in texts if text]
    assert text.startswith("CollectiveMismatchError")
    assert "layer0/w" in text
    assert "layer1/w" in text


# --- refused settings -----------------------------------------------------------------

_ALONE_AGAIN = "restart: {max: 1, scope: task}\n"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(
            "tasks: {worker: 2}\nruntime: {strategy: parameter_server}\n",
            "strategy parameter_server needs ps tasks",
            id="no ps",
        ),
        pytest.param(
            "tasks: {worker: 2}\nruntime: {strategy: replicated}\n",
            "strategy replicated needs ps tasks",
            id="nothing to replicate",
        ),
        pytest.param(
            "tasks: {worker: 2, ps: 1}\nruntime: {strategy: replicated}\n"
            + _ALONE_AGAIN,
            "under replicated a single task cannot rejoin the others",
            id="replicated, one again",
        ),
        pytest.param(
            "tasks: {worker: 2, ps: 1}\nruntime: {synchronous: true}\n" + _ALONE_AGAIN,
            "under parameter_server with 'synchronous' a single task cannot rejoin",
            id="in step, one again",
        ),
        pytest.param(
            "tasks: {worker: 2, ps: 1}\nruntime: {synchronous: sometimes}\n",
            "'synchronous' must be true or false",
            id="no such way",
        ),
    ],
)
def test_wrong_settings_are_reported_with_line_and_column(
    content: str, words: str, tmp_path: Path
) -> None:
    found = problems(tmp_path, f"command: python train.py\n{content}")
    (problem,) = [problem for problem in found if not problem.warning]
    assert words in problem.message
    assert problem.where.startswith("cluster.yaml:")


def test_one_that_comes_alone_may_come_again(tmp_path: Path) -> None:
    content = "command: python train.py\ntasks: {worker: 2, ps: 1}\n" + _ALONE_AGAIN
    assert loaded(tmp_path, content)
