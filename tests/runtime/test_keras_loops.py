"""Ranks train the same as one process: ``programs/cases/loops.py``."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.runtime.keras_checks import (
    LOOPS_THAT_TELL_THEIR_ROWS,
    MARKS,
    assert_equal_to_one,
    compare,
    equal_of,
)
from tests.runtime.keras_jobs import Compared, Outcomes, at_each_size
from tfcluster.runtime.keras.batches.batch_sharding import trial_bounds

pytestmark = MARKS


@at_each_size(equal_of("loops"))
def test_ranks_train_what_one_process_trains(compared: Compared) -> None:
    compare(compared)


@at_each_size(LOOPS_THAT_TELL_THEIR_ROWS)
def test_tape_loops_are_divided_from_their_second_batch(
    compared: Compared, request: pytest.FixtureRequest
) -> None:
    one, size = compared.one, compared.size
    for rank, found in enumerate(compared.ranks):
        others = {key: value for key, value in found.items() if key != "rows"}
        assert_equal_to_one({k: v for k, v in one.items() if k != "rows"}, others)
        # 96 rows in batches of 10, the last of 6; each epoch's first batch is whole.
        start, end = (
            rank * np.array([10, 6]) // size,
            (rank + 1) * np.array([10, 6]),
        )
        share, last = end // size - start
        whole = [10, *[share] * 8, last] * 3
        # Each optimizer has one trial step, in which rank 1 has the rows of rank 0,
        # each twice. It requires that at least as many batches are certain to follow
        # as the last gradient took.
        low, high = trial_bounds(10, rank, size)
        tried = (high - low) * (2 if rank == 1 else 1)
        at_once, later = [10, tried, *whole[2:]], [*whole[:2], tried, *whole[3:]]
        rows = found["rows"].tolist()
        eager = "tape_eager" in request.node.name
        assert rows == at_once or (rows == later and not eager)


@at_each_size(["tape_graph"])
def test_loops_that_do_not_train_see_all_rows(compared: Compared) -> None:
    assert [int(found["seen"]) for found in compared.ranks] == [96] * compared.size


@pytest.mark.parametrize("case", ["tape_on_arrays", "tape_on_arrays_of_a_dataset"])
def test_a_loop_that_cannot_be_divided_is_pointed_out(
    outcomes: Outcomes, case: str
) -> None:
    said = outcomes.said(case)
    assert said.count("every rank computed the same gradient") == 1


@pytest.mark.slow
def test_a_loop_in_one_function_is_pointed_out(outcomes: Outcomes) -> None:
    said = outcomes.said("tape_in_one_function")
    (warning,) = [line for line in said.splitlines() if "the same gradient" in line]
    assert "every rank computed the same gradient" in warning
    assert "outside of a tf.function" in warning


def test_a_loop_that_xla_was_to_compile_does_without(outcomes: Outcomes) -> None:
    said = outcomes.said("tape_compiled_by_xla")
    assert said.count("it runs without jit_compile=True") == 1


@pytest.mark.slow
def test_a_graph_that_a_session_trains_is_pointed_out(outcomes: Outcomes) -> None:
    said = outcomes.said("session_of_tensorflow_1")
    assert said.count("this graph of TensorFlow 1 is not distributed") == 1
    assert re.search(r"cases/loops\.py:\d+: this graph", said)


@pytest.mark.slow
def test_a_loss_of_ragged_rows_is_pointed_out(outcomes: Outcomes) -> None:
    said = outcomes.said("tape_on_ragged_rows")
    assert said.count("this loss cannot be checked") == 1
