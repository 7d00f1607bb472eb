"""Keras programs on 2, 3 and 4 ranks give the results of one process.

All cases run in a few jobs (``keras_jobs.py``); each test then looks at one of them.
docs/equality.md names these tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.runtime.keras_jobs import (
    CASES,
    LIMIT_S,
    PER_WORKER_CASES,
    Compared,
    Outcomes,
    Values,
    run_all,
)
from tfcluster.runtime.division import trial_bounds

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(LIMIT_S + 100)]

WEIGHTS, METRICS = 1e-5, 1e-6
"""Of float32, relative to an array's largest value."""

HALF_PRECISION = ["mixed_bfloat16", "mixed_precision", "overflow"]
STATISTICAL = ["batch_normalization", "dropout"]
LOOPS_THAT_TELL_THEIR_ROWS = ["tape_eager", "tape_graph"]
OTHERS = [
    "checkpoints",
    "files",
    "one_rank_stops",
    "unwritable",
    "without_a_fixed_order",
    "written",
]
EQUAL = sorted(
    CASES.keys() - {*HALF_PRECISION, *STATISTICAL, *LOOPS_THAT_TELL_THEIR_ROWS, *OTHERS}
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_all(tmp_path_factory.mktemp("cases"))


def assert_equal_on_all_ranks(ranks: list[Values]) -> None:
    for other in ranks[1:]:
        assert other.keys() == ranks[0].keys()
        for key, value in ranks[0].items():
            np.testing.assert_array_equal(other[key], value, err_msg=key)


def assert_equal_to_one(
    one: Values, found: Values, *, tolerance: float | None = None
) -> None:
    """Weights, and numbers about them, are those of one process up to rounding."""
    assert found.keys() == one.keys()
    for key, value in one.items():
        if value.dtype.kind not in "fiu":
            np.testing.assert_array_equal(found[key], value, err_msg=key)
            continue
        limit = tolerance or (METRICS if is_metric(key) else WEIGHTS)
        largest = np.abs(value).max() if value.size else 0.0
        np.testing.assert_allclose(
            found[key], value, rtol=0, atol=limit * largest + 1e-12, err_msg=key
        )


def is_metric(key: str) -> bool:
    return "history" in key or "evaluate" in key


def compare(compared: list[Compared], **kwargs: Any) -> None:
    for case in compared:
        assert_equal_on_all_ranks(case.ranks)
        assert_equal_to_one(case.one, case.ranks[0], **kwargs)


@pytest.mark.parametrize("case", EQUAL)
def test_ranks_train_what_one_process_trains(outcomes: Outcomes, case: str) -> None:
    compare(outcomes.of(case))


@pytest.mark.parametrize("case", PER_WORKER_CASES)
def test_batches_per_worker_are_parts_of_a_larger_one(
    outcomes: Outcomes, case: str
) -> None:
    compare(outcomes.of(case))


def test_the_example_trains_what_one_process_trains(outcomes: Outcomes) -> None:
    compare([outcomes.digits()], tolerance=1e-4)


@pytest.mark.parametrize("case", HALF_PRECISION)
def test_half_precision_rounds_in_its_own_way(outcomes: Outcomes, case: str) -> None:
    compare(outcomes.of(case), tolerance=1e-2 if case == "mixed_bfloat16" else 5e-3)


def test_mixed_precision_agrees_on_the_scale(outcomes: Outcomes) -> None:
    for case in outcomes.of("mixed_precision"):
        assert case.ranks[0]["wrapped"]
        assert case.ranks[0]["scale"] == case.one["scale"]


def test_a_step_that_overflows_on_one_rank_is_taken_by_none(
    outcomes: Outcomes,
) -> None:
    for case in outcomes.of("overflow"):
        assert int(case.one["taken"]) == int(case.ranks[0]["taken"]) == 4


@pytest.mark.parametrize("case", LOOPS_THAT_TELL_THEIR_ROWS)
def test_tape_loops_are_divided_from_their_second_batch(
    outcomes: Outcomes, case: str
) -> None:
    for compared in outcomes.of(case):
        one, size = compared.one, compared.size
        for rank, found in enumerate(compared.ranks):
            others = {key: value for key, value in found.items() if key != "rows"}
            assert_equal_to_one({k: v for k, v in one.items() if k != "rows"}, others)
            # 96 rows in batches of 10, the last of 6; the first of each epoch is whole.
            start, end = (
                rank * np.array([10, 6]) // size,
                (rank + 1) * np.array([10, 6]),
            )
            share, last = end // size - start
            whole = [10, *[share] * 8, last] * 3
            # Rank 1 tries what rank 0 has, each row twice, once for each optimizer: as
            # soon as there are as many batches as have come since the last gradient.
            low, high = trial_bounds(10, rank, size)
            tried = (high - low) * (2 if rank == 1 else 1)
            at_once, later = [10, tried, *whole[2:]], [*whole[:2], tried, *whole[3:]]
            rows = found["rows"].tolist()
            assert rows == at_once or (rows == later and case != "tape_eager")


def test_loops_that_do_not_train_see_all_rows(outcomes: Outcomes) -> None:
    for case in outcomes.of("tape_graph"):
        assert [int(found["seen"]) for found in case.ranks] == [96] * case.size


@pytest.mark.parametrize("case", STATISTICAL)
def test_statistics_of_a_part_stay_finite_and_equal(
    outcomes: Outcomes, case: str
) -> None:
    for compared in outcomes.of(case):
        assert_equal_on_all_ranks(compared.ranks)
        for key, value in compared.ranks[0].items():
            assert np.isfinite(value).all(), key
            assert value.shape == compared.one[key].shape


def test_moving_averages_are_those_of_all_rows(outcomes: Outcomes) -> None:
    for case in outcomes.of("batch_normalization"):
        np.testing.assert_allclose(
            case.ranks[0]["moving_mean"], case.one["moving_mean"], atol=5e-3
        )


def test_ranks_drop_out_other_units(outcomes: Outcomes) -> None:
    (case,) = outcomes.of("dropout")
    assert not np.allclose(case.ranks[0]["w0"], case.one["w0"])


def test_a_dataset_without_a_fixed_order_trains(outcomes: Outcomes) -> None:
    for case in outcomes.of("without_a_fixed_order"):
        assert_equal_on_all_ranks(case.ranks)


def test_training_ends_everywhere_when_one_rank_wants_to(outcomes: Outcomes) -> None:
    (case,) = outcomes.of("one_rank_stops")
    assert_equal_on_all_ranks(case.ranks)
    assert int(case.ranks[0]["batches"]) == 2


def test_only_the_chief_writes(outcomes: Outcomes) -> None:
    (case,) = outcomes.of("files")
    named = [
        {str(name) for name in found["written"] if not str(name).startswith("tmp")}
        for found in [case.one, *case.ranks]
    ]
    assert "best.keras" in named[0]
    assert named[1:] == [named[0], set(), set()]
    assert all(found["same"] for found in case.ranks)
    header, *epochs = str(case.ranks[1]["log"]).splitlines()
    assert header.startswith("epoch,accuracy,loss,val_")
    assert len(epochs) == 2


def test_weights_files_are_there_after_training(outcomes: Outcomes) -> None:
    folder = outcomes.jobs["cases-3"].folder / "deep" / "er"
    assert {path.name for path in folder.iterdir()} == {
        "1.weights.h5",
        "2.weights.h5",
    }


def test_checkpoints_of_tensorflow_are_the_chiefs(outcomes: Outcomes) -> None:
    for case in outcomes.of("checkpoints"):
        assert_equal_on_all_ranks([case.one, *case.ranks])
        assert case.ranks[-1]["restored"]


def test_an_exported_model_serves_what_was_trained(outcomes: Outcomes) -> None:
    for case in outcomes.of("written"):
        assert_equal_on_all_ranks(case.ranks)
        assert_equal_to_one(case.one, case.ranks[0])
        np.testing.assert_allclose(
            case.ranks[-1]["served"], case.ranks[-1]["predicted"], rtol=1e-5
        )


def test_an_error_while_saving_is_raised_on_all_ranks(outcomes: Outcomes) -> None:
    for case in outcomes.of("unwritable"):
        raised = str(case.one["raised"])
        assert raised != "nothing"
        assert [str(found["raised"]) for found in case.ranks] == [raised] * case.size


def test_only_the_chief_shows_progress(outcomes: Outcomes) -> None:
    chief, *others = outcomes.jobs["digits-3"].outputs
    assert "Epoch 3/3" in chief
    for output in others:
        assert "Epoch" not in output
        assert "validation loss" in output  # The script's own print.


def test_the_printed_result_is_that_of_one_process(outcomes: Outcomes) -> None:
    lines = {
        line
        for name in ("digits-1", "digits-3")
        for output in outcomes.jobs[name].outputs
        for line in output.splitlines()
        if line.startswith("validation loss")
    }
    assert len(lines) == 1


def test_a_loop_that_cannot_be_divided_is_pointed_out(outcomes: Outcomes) -> None:
    size = CASES["tape_on_arrays"][1][0]
    chief = outcomes.jobs[f"cases-{size}"].outputs[0]
    assert chief.count("every rank computed the same gradient") == 1


def test_a_loop_that_xla_was_to_compile_does_without(outcomes: Outcomes) -> None:
    size = CASES["tape_compiled_by_xla"][1][0]
    chief = outcomes.jobs[f"cases-{size}"].outputs[0]
    assert chief.count("it runs without jit_compile=True") == 1


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("strategies_of_clusters", "makes a MultiWorkerMirroredStrategy of its own"),
        ("experimental_strategies", "makes a MultiWorkerMirroredStrategy of its own"),
        ("parameter_servers", "makes a ParameterServerStrategy of its own"),
        ("two_replicas", "makes a MirroredStrategy of its own"),
        ("states_of_rows", "is stateful"),
        ("function_that_sums", "total returns the sum over the rows"),
        ("function_that_sums_eagerly", "total returns the sum over the rows"),
        ("step_that_sums", "grow with the rows of a batch"),
        ("step_that_sums_with_dropout", "grow with the rows of a batch"),
        ("step_that_sums_eagerly", "grow with the rows of a batch"),
        ("step_that_sums_eagerly_with_dropout", "grow with the rows of a batch"),
        ("step_that_sums_equal_batches", "grow with the rows of a batch"),
        ("step_that_sums_equal_batches_with_dropout", "grow with the rows of a batch"),
        ("step_that_sums_in_every_other", "grow with the rows of a batch"),
        ("step_that_sums_over_embeddings", "grow with the rows of a batch"),
        ("step_that_sums_ragged", "grow with the rows of a batch"),
        ("step_that_sums_sparse", "grow with the rows of a batch"),
        ("step_that_sums_sparse_eagerly", "grow with the rows of a batch"),
        ("step_whose_loss_sums", "grow with the rows of a batch"),
        ("loop_that_sums", "grow with the rows of a batch"),
        ("loop_that_sums_with_dropout", "grow with the rows of a batch"),
        ("loop_that_sums_eagerly", "grow with the rows of a batch"),
        ("loop_that_sums_eagerly_with_dropout", "grow with the rows of a batch"),
        ("loop_that_sums_unknown_batches", "grow with the rows of a batch"),
        ("loop_that_sums_ragged", "grow with the rows of a batch"),
        ("loop_that_sums_sparse", "grow with the rows of a batch"),
        ("second_loop_that_sums", "descent (2) grow with the rows of a batch"),
        ("added_sum", "the layer penalty adds the sum over the rows"),
        ("added_sum_eagerly", "the layer penalty adds the sum over the rows"),
        ("added_sum_in_training_only", "the layer penalty adds the sum"),
        ("added_sum_in_a_step_of_ones_own", "the layer penalty adds the sum"),
    ],
)
def test_what_would_train_wrongly_is_refused(
    outcomes: Outcomes, case: str, text: str
) -> None:
    for found in outcomes.refused(case):
        assert str(found["raised"]).startswith("CollectiveError: ")
        assert text in str(found["raised"])


@pytest.mark.parametrize(
    "case",
    [
        *("one_replica", "whole_batch", "unlike_data", "added_mean", "added_root"),
        *("step_of_a_mean", "step_of_a_sum_that_is_divided"),
        *("step_of_a_mean_with_dropout", "loop_of_a_mean_with_dropout"),
        *("loop_that_sums_a_part", "loop_of_sums_that_are_divided"),
    ],
)
def test_the_rest_is_not(outcomes: Outcomes, case: str) -> None:
    assert {str(found["raised"]) for found in outcomes.refused(case)} == {"nothing"}


@pytest.mark.parametrize(
    ("job", "text"),
    [
        ("refused-2", "dice is no mean over the rows"),
        ("refused-2", "the layer root adds to the loss is no mean over the rows"),
        ("refused-2", "the ranks read different batches"),
        ("sums-2", "the gradients for partial are 1."),
    ],
)
def test_what_may_differ_is_pointed_out(
    outcomes: Outcomes, job: str, text: str
) -> None:
    assert outcomes.jobs[job].outputs[0].count(text) == 1
