"""Programs that would train wrongly are refused; possible differences give a warning.

The cases are those of ``programs/cases/refused.py``.
"""

from __future__ import annotations

import pytest

from tests.runtime.keras_checks import MARKS, assert_not_refused, assert_refused
from tests.runtime.keras_jobs import Outcomes, in_tiers, refused_job_of
from tests.runtime.ranks import PROGRAMS

pytestmark = MARKS


@pytest.mark.parametrize(
    ("case", "text"),
    in_tiers(
        [
            (
                "strategies_of_clusters",
                "creates a MultiWorkerMirroredStrategy",
            ),
            (
                "experimental_strategies",
                "creates a MultiWorkerMirroredStrategy",
            ),
            ("parameter_servers", "creates a ParameterServerStrategy"),
            ("two_replicas", "creates a MirroredStrategy"),
            ("states_of_rows", "is stateful"),
            ("function_that_sums", "total returns the sum over the rows"),
            ("function_that_sums_eagerly", "total returns the sum over the rows"),
            ("rate_by_its_own_loss", "the learning_rate of descent is "),
            ("rate_by_its_own_loss", "step 21 of descent; it was the same in step 20"),
            ("momentum_by_its_own_loss", "the momentum of descent"),
            ("weights_by_its_own_loss", "last/kernel differs by "),
            ("weights_by_its_own_loss", "it was the same in step 16"),
            ("added_sum", "the layer penalty adds the sum over the rows"),
            ("added_sum_eagerly", "the layer penalty adds the sum over the rows"),
            ("added_number_for_each_row", "the layer penalty adds the sum"),
            ("added_sum_in_training_only", "the layer penalty adds the sum"),
            ("added_sum_in_a_custom_step", "the layer penalty adds the sum"),
            ("changed_gradients_of_a_graph", "last/kernel before sgd"),
            ("spread_kept_by_a_layer", "spread is set by a custom layer"),
            ("added_root", "not a mean over the rows of a batch"),
            ("added_root", "set runtime.on_difference to warn"),
            ("clipped_backwards", "changes gradients in the backward pass by their"),
            ("clipped_backwards_eagerly", "changes gradients in the backward pass"),
            ("unlike_data", "the ranks read different batches"),
            ("counted_in_a_step", "sets counts_in_its_step/seen from the rows"),
            ("shuffled_rows", "each rank shuffles only its own rows"),
            ("learned_classes", "samples other classes than one machine"),
            ("divided_by_its_maximum", "the layer scaling for a row depends on"),
            ("masked_loss", "this loss is not a mean over the rows of a batch"),
            ("gradients_of_gradients", "a gradient of weights is differentiated"),
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
            *("one_replica", "added_mean", "counted_as_declared"),
            *("reversed_backwards", "reversed_backwards_in_a_loop"),
            *("changes_that_all_ranks_make", "batch_shape_that_does_no_harm"),
            "added_number_for_each_row_of_which_a_step_takes_the_mean",
        ]
    ),
)
def test_the_rest_is_not(outcomes: Outcomes, case: str) -> None:
    assert_not_refused(outcomes.refused(case))


def test_what_a_step_says_of_its_counts_is_done(outcomes: Outcomes) -> None:
    found = outcomes.refused("counted_as_declared")
    assert [int(values["said"]) for values in found] == [43, 43]


@pytest.mark.parametrize(
    ("case", "text"),
    in_tiers(
        [
            (
                "endless_epoch",
                "the dataset is infinite and fit() has no steps_per_epoch",
            ),
        ]
    ),
)
def test_what_may_differ_is_pointed_out(
    outcomes: Outcomes, case: str, text: str
) -> None:
    chief, *_ = outcomes.jobs[refused_job_of(case)].outputs
    assert chief.count(text) == 1


@pytest.mark.slow
def test_batches_need_the_rows_of_their_states(outcomes: Outcomes) -> None:
    for found in outcomes.refused("states_of_other_rows"):
        assert "is stateful, for batches of 4 rows" in str(found["raised"])


@pytest.mark.slow
def test_draws_in_loops_over_rows_are_pointed_out(outcomes: Outcomes) -> None:
    assert_not_refused(outcomes.refused("drawn_for_each_row"))
    lines = outcomes.said("drawn_for_each_row").splitlines()
    warned = {line.split(": the step")[0] for line in lines if "in a loop (tf" in line}
    source = (PROGRAMS / "cases" / "refused.py").read_text().splitlines()
    numbers = [int(each.rpartition(":")[2]) for each in warned]
    assert sorted(source[number - 1].strip() for number in numbers) == [
        "return tf.map_fn(lambda row: row * keras.random.uniform([], seed=seeds), x)",
        "return tf.map_fn(lambda row: row * tf.random.uniform([]), x)",
        "return tf.vectorized_map(lambda row: row * tf.random.uniform([]), x)",
        "total += row * tf.random.uniform([])",
    ]
