"""Ranks train the same as one process: ``programs/cases/models.py``."""

from __future__ import annotations

import pytest

from tests.runtime.keras_checks import (
    MARKS,
    compare,
    equal_of,
)
from tests.runtime.keras_jobs import Compared, Outcomes, at_each_size

pytestmark = MARKS


@at_each_size(equal_of("models"))
def test_ranks_train_what_one_process_trains(compared: Compared) -> None:
    compare(compared)


@pytest.mark.slow
def test_a_model_that_xla_was_to_compile_is_pointed_out(outcomes: Outcomes) -> None:
    said = outcomes.said("compiled_by_xla")
    assert said.count("runs without XLA, as with compile(jit_compile=False)") == 1
