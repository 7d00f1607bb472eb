"""Keras programs on 2, 3 and 4 ranks give the results of one process.

The cases run in a few jobs (``keras_jobs.py``); each test then looks at one of them.
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
    at_each_size,
    in_tiers,
    outcomes_in,
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
    return outcomes_in(tmp_path_factory.mktemp("cases"))


@pytest.fixture
def compared(outcomes: Outcomes, request: pytest.FixtureRequest) -> Compared:
    """A case on a number of ranks: see ``at_each_size``."""
    return outcomes.at(*request.param)


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


def compare(compared: Compared, **kwargs: Any) -> None:
    assert_equal_on_all_ranks(compared.ranks)
    assert_equal_to_one(compared.one, compared.ranks[0], **kwargs)


@at_each_size(EQUAL)
def test_ranks_train_what_one_process_trains(compared: Compared) -> None:
    compare(compared)


@at_each_size(PER_WORKER_CASES)
def test_batches_per_worker_are_parts_of_a_larger_one(compared: Compared) -> None:
    compare(compared)


def test_the_example_trains_what_one_process_trains(outcomes: Outcomes) -> None:
    # Adam divides by a gradient's own size: rounding shows in weights whose gradients
    # nearly vanish.
    compare(outcomes.digits(), tolerance=3e-4)


@at_each_size(["mixed_bfloat16"])
def test_bfloat16_rounds_in_its_own_way(compared: Compared) -> None:
    compare(compared, tolerance=1e-2)


@at_each_size(["mixed_precision", "overflow"])
def test_half_precision_rounds_in_its_own_way(compared: Compared) -> None:
    compare(compared, tolerance=5e-3)


@at_each_size(["mixed_precision"])
def test_mixed_precision_agrees_on_the_scale(compared: Compared) -> None:
    assert compared.ranks[0]["wrapped"]
    assert compared.ranks[0]["scale"] == compared.one["scale"]


@at_each_size(["overflow"])
def test_a_step_that_overflows_on_one_rank_is_taken_by_none(
    compared: Compared,
) -> None:
    assert int(compared.one["taken"]) == int(compared.ranks[0]["taken"]) == 4


@at_each_size(LOOPS_THAT_TELL_THEIR_ROWS)
def test_tape_loops_are_divided_from_their_second_batch(
    compared: Compared, request: pytest.FixtureRequest
) -> None:
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
        eager = "tape_eager" in request.node.name
        assert rows == at_once or (rows == later and not eager)


@at_each_size(["tape_graph"])
def test_loops_that_do_not_train_see_all_rows(compared: Compared) -> None:
    assert [int(found["seen"]) for found in compared.ranks] == [96] * compared.size


@at_each_size(STATISTICAL)
def test_statistics_of_a_part_stay_finite_and_equal(compared: Compared) -> None:
    assert_equal_on_all_ranks(compared.ranks)
    for key, value in compared.ranks[0].items():
        assert np.isfinite(value).all(), key
        assert value.shape == compared.one[key].shape


@at_each_size(["batch_normalization"])
def test_moving_averages_are_those_of_all_rows(compared: Compared) -> None:
    np.testing.assert_allclose(
        compared.ranks[0]["moving_mean"], compared.one["moving_mean"], atol=5e-3
    )


@at_each_size(["dropout"])
def test_ranks_drop_out_other_units(compared: Compared) -> None:
    assert not np.allclose(compared.ranks[0]["w0"], compared.one["w0"])


@at_each_size(["without_a_fixed_order"])
def test_a_dataset_without_a_fixed_order_trains(compared: Compared) -> None:
    assert_equal_on_all_ranks(compared.ranks)


@at_each_size(["one_rank_stops"])
def test_training_ends_everywhere_when_one_rank_wants_to(compared: Compared) -> None:
    assert_equal_on_all_ranks(compared.ranks)
    assert int(compared.ranks[0]["batches"]) == 2


@at_each_size(["files"])
def test_only_the_chief_writes(compared: Compared) -> None:
    named = [
        {str(name) for name in found["written"] if not str(name).startswith("tmp")}
        for found in [compared.one, *compared.ranks]
    ]
    assert "best.keras" in named[0]
    assert named[1:] == [named[0], *[set()] * (compared.size - 1)]
    assert all(found["same"] for found in compared.ranks)
    header, *epochs = str(compared.ranks[1]["log"]).splitlines()
    assert header.startswith("epoch,accuracy,loss,val_")
    assert len(epochs) == 2


def test_weights_files_are_there_after_training(outcomes: Outcomes) -> None:
    folder = outcomes.jobs["cases-3"].folder / "deep" / "er"
    assert {path.name for path in folder.iterdir()} == {
        "1.weights.h5",
        "2.weights.h5",
    }


@at_each_size(["checkpoints"])
def test_checkpoints_of_tensorflow_are_the_chiefs(compared: Compared) -> None:
    assert_equal_on_all_ranks([compared.one, *compared.ranks])
    assert compared.ranks[-1]["restored"]


@at_each_size(["written"])
def test_an_exported_model_serves_what_was_trained(compared: Compared) -> None:
    assert_equal_on_all_ranks(compared.ranks)
    assert_equal_to_one(compared.one, compared.ranks[0])
    last = compared.ranks[-1]
    np.testing.assert_allclose(last["served"], last["predicted"], rtol=1e-5)


def test_files_are_downloaded_once_on_a_host(outcomes: Outcomes) -> None:
    folder = outcomes.folder_of("downloads")
    requests = (folder / "requests.txt").read_text().splitlines()
    assert [request.rpartition("/")[2] for request in requests] == [
        "callbacks.py",
        "texts.zip",
    ]


def test_summaries_are_written_by_the_chief(outcomes: Outcomes) -> None:
    folder = outcomes.folder_of("summaries") / "figures"
    assert len(list(folder.iterdir())) == 1


def test_datasets_are_saved_by_the_chief_and_cached_by_each(outcomes: Outcomes) -> None:
    size = CASES["cached_in_files"][1][0]
    folder = outcomes.folder_of("cached_in_files")
    caches = {path.name for path in folder.glob("cached*.index")}
    others = {f"cached.rank{rank}.index" for rank in range(1, size)}
    assert caches == {"cached.index", *others}
    assert not list(folder.glob("saved.rank*"))


@at_each_size(["unwritable"])
def test_an_error_while_saving_is_raised_on_all_ranks(compared: Compared) -> None:
    raised = str(compared.one["raised"])
    assert raised != "nothing"
    errors = [str(found["raised"]) for found in compared.ranks]
    assert errors == [raised] * compared.size


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
    said = outcomes.output("tape_on_arrays")
    assert said.count("every rank computed the same gradient") == 1


def test_a_loop_that_xla_was_to_compile_does_without(outcomes: Outcomes) -> None:
    said = outcomes.output("tape_compiled_by_xla")
    assert said.count("it runs without jit_compile=True") == 1


@pytest.mark.parametrize(
    ("case", "text"),
    in_tiers(
        [
            (
                "strategies_of_clusters",
                "makes a MultiWorkerMirroredStrategy of its own",
            ),
            (
                "experimental_strategies",
                "makes a MultiWorkerMirroredStrategy of its own",
            ),
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
            (
                "step_that_sums_equal_batches_with_dropout",
                "grow with the rows of a batch",
            ),
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
            ("rate_by_its_own_loss", "the learning_rate of descent is "),
            ("rate_by_its_own_loss", "step 21 of descent; it was the same in step 20"),
            ("momentum_by_its_own_loss", "the momentum of descent"),
            ("weights_by_its_own_loss", "last/kernel differs by "),
            ("weights_by_its_own_loss", "it was the same in step 16"),
            ("added_sum", "the layer penalty adds the sum over the rows"),
            ("added_sum_eagerly", "the layer penalty adds the sum over the rows"),
            ("added_sum_in_training_only", "the layer penalty adds the sum"),
            ("added_sum_in_a_step_of_ones_own", "the layer penalty adds the sum"),
            ("spread_kept_by_a_layer", "spread is set by a layer of the program's own"),
        ]
    ),
)
def test_what_would_train_wrongly_is_refused(
    outcomes: Outcomes, case: str, text: str
) -> None:
    for found in outcomes.refused(case):
        assert str(found["raised"]).startswith("CollectiveError: ")
        assert text in str(found["raised"])


@pytest.mark.parametrize(
    "case",
    in_tiers(
        [
            *("one_replica", "whole_batch", "unlike_data", "added_mean", "added_root"),
            *("step_of_a_mean", "step_of_a_sum_that_is_divided"),
            *("step_of_a_mean_with_dropout", "loop_of_a_mean_with_dropout"),
            *("loop_that_sums_a_part", "loop_of_sums_that_are_divided"),
            "changes_that_all_ranks_make",
            "counted_in_a_step",
        ]
    ),
)
def test_the_rest_is_not(outcomes: Outcomes, case: str) -> None:
    assert {str(found["raised"]) for found in outcomes.refused(case)} == {"nothing"}


def test_what_a_step_says_of_its_counts_is_done(outcomes: Outcomes) -> None:
    found = outcomes.refused("counted_in_a_step")
    assert [int(values["said"]) for values in found] == [43, 43]


@pytest.mark.parametrize(
    ("job", "text"),
    [
        ("refused-2", "dice is no mean over the rows"),
        ("refused-2", "the layer root adds to the loss is no mean over the rows"),
        ("refused-2", "the ranks read different batches"),
        ("refused-2", "sets counts_in_its_step/seen from the rows of a batch"),
        ("sums-2", "the gradients for partial are 1."),
    ],
)
def test_what_may_differ_is_pointed_out(
    outcomes: Outcomes, job: str, text: str
) -> None:
    assert outcomes.jobs[job].outputs[0].count(text) == 1
