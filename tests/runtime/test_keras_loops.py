"""Ranks train the same as one process: ``programs/cases/loops.py``."""

from __future__ import annotations

import re

import pytest

from tests.runtime.keras_checks import (
    MARKS,
    compare,
    equal_of,
)
from tests.runtime.keras_jobs import Compared, Outcomes, at_each_size

pytestmark = MARKS


@at_each_size(equal_of("loops"))
def test_ranks_train_what_one_process_trains(compared: Compared) -> None:
    compare(compared)


@at_each_size(["tape_graph"])
def test_loops_that_do_not_train_see_all_rows(compared: Compared) -> None:
    assert [int(found["seen"]) for found in compared.ranks] == [96] * compared.size


def test_a_loop_without_a_function_is_pointed_out(outcomes: Outcomes) -> None:
    said = outcomes.said("tape_on_arrays")
    assert said.count("every rank computed the same gradient") == 1


@pytest.mark.slow
def test_a_graph_that_a_session_trains_is_pointed_out(outcomes: Outcomes) -> None:
    said = outcomes.said("session_of_tensorflow_1")
    assert said.count("this graph of TensorFlow 1 is not distributed") == 1
    assert re.search(r"cases/loops\.py:\d+: this graph", said)
