"""The digits example trains the same model on three ranks as in one process."""

from __future__ import annotations

import pytest

from tests.runtime.keras_checks import MARKS, compare
from tests.runtime.keras_jobs import Outcomes

pytestmark = [*MARKS, pytest.mark.slow]


def test_the_example_trains_what_one_process_trains(outcomes: Outcomes) -> None:
    # Adam divides by the size of a gradient, so rounding errors are visible in weights
    # whose gradients are nearly zero.
    compare(outcomes.digits(), tolerance=3e-4)


def test_only_the_chief_shows_progress(outcomes: Outcomes) -> None:
    chief, *others = outcomes.jobs["digits-3"].outputs
    assert "Epoch 3/3" in chief
    for output in others:
        assert "Epoch" not in output
        assert "validation loss" in output  # Printed by the script itself.


def test_the_printed_result_is_that_of_one_process(outcomes: Outcomes) -> None:
    lines = {
        line
        for name in ("digits-1", "digits-3")
        for output in outcomes.jobs[name].outputs
        for line in output.splitlines()
        if line.startswith("validation loss")
    }
    assert len(lines) == 1
