"""Gradients that grow with the number of rows in a batch are refused.

The cases are those of ``programs/cases/sums.py``.
"""

from __future__ import annotations

import pytest

from tests.runtime.keras_checks import MARKS, assert_not_refused, assert_refused
from tests.runtime.keras_jobs import Outcomes, in_tiers

pytestmark = MARKS


@pytest.mark.parametrize(
    ("case", "text"),
    in_tiers(
        [
            ("step_that_sums", "grow with the number of rows in a batch"),
            ("step_that_sums_with_dropout", "grow with the number of rows in a batch"),
            ("step_that_sums_eagerly", "grow with the number of rows in a batch"),
            (
                "step_that_sums_eagerly_with_dropout",
                "grow with the number of rows in a batch",
            ),
            ("step_that_sums_equal_batches", "grow with the number of rows in a batch"),
            (
                "step_that_sums_equal_batches_with_dropout",
                "grow with the number of rows in a batch",
            ),
            (
                "step_that_sums_in_every_other",
                "grow with the number of rows in a batch",
            ),
            (
                "step_that_sums_over_embeddings",
                "grow with the number of rows in a batch",
            ),
            ("step_that_sums_ragged", "grow with the number of rows in a batch"),
            ("step_that_sums_sparse", "grow with the number of rows in a batch"),
            (
                "step_that_sums_sparse_eagerly",
                "grow with the number of rows in a batch",
            ),
            ("step_whose_loss_sums", "grow with the number of rows in a batch"),
            ("loop_that_sums", "grow with the number of rows in a batch"),
            ("loop_that_sums_with_dropout", "grow with the number of rows in a batch"),
            ("loop_that_sums_eagerly", "grow with the number of rows in a batch"),
            (
                "loop_that_sums_eagerly_with_dropout",
                "grow with the number of rows in a batch",
            ),
            (
                "loop_that_sums_unknown_batches",
                "grow with the number of rows in a batch",
            ),
            ("loop_that_sums_ragged", "grow with the number of rows in a batch"),
            ("loop_that_sums_sparse", "grow with the number of rows in a batch"),
            (
                "second_loop_that_sums",
                "descent (2) grow with the number of rows in a batch",
            ),
            ("loop_that_sums_a_part", "the gradients for partial are 1."),
        ]
    ),
)
def test_what_would_train_wrongly_is_refused(
    outcomes: Outcomes, case: str, text: str
) -> None:
    assert_refused(outcomes.refused(case), text)


@pytest.mark.parametrize(
    "case",
    in_tiers(
        [
            *("step_of_a_mean", "step_of_a_sum_that_is_divided"),
            *("step_of_a_mean_with_dropout", "loop_of_a_mean_with_dropout"),
            "loop_of_sums_that_are_divided",
        ]
    ),
)
def test_the_rest_is_not(outcomes: Outcomes, case: str) -> None:
    assert_not_refused(outcomes.refused(case))
