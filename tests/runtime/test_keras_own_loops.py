"""Ranks train the same as one process: ``programs/cases/own_loops.py``."""

from __future__ import annotations

import pytest

from tests.runtime.keras_checks import (
    MARKS,
    assert_refused,
    compare,
    equal_of,
)
from tests.runtime.keras_jobs import Compared, Outcomes, at_each_size

pytestmark = MARKS


@at_each_size(equal_of("own_loops"))
def test_ranks_train_what_one_process_trains(compared: Compared) -> None:
    compare(compared)


def test_ranks_with_different_batches_compute_the_chief_s(outcomes: Outcomes) -> None:
    said = outcomes.said("unlike_data")
    assert said.count("the ranks have different batches, so all of them compute") == 1


def test_a_function_under_an_eager_tape_is_divided(outcomes: Outcomes) -> None:
    said = outcomes.said("function_between_tapes")
    assert "every rank computed the same gradient" not in said


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("strategies_of_clusters", "MultiWorkerMirroredStrategy"),
        ("parameter_servers", "ParameterServerStrategy"),
        ("two_replicas", "MirroredStrategy"),
        pytest.param(
            "experimental_strategies",
            "MultiWorkerMirroredStrategy",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_strategies_that_divide_batches_themselves_are_refused(
    outcomes: Outcomes, case: str, name: str
) -> None:
    (compared,) = outcomes.of(case)
    assert_refused(compared.ranks, f"creates a {name}")
