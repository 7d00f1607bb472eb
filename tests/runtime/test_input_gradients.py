"""Gradients with respect to rows: what they are of, and when there is a warning.

That they are equal to those of one process is in ``test_keras_changed_gradients.py``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from tests.runtime.ranks import PROGRAMS, Job, Jobs, Ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]

KINDS = {
    "MEAN": [
        *("mean", "mean_of_everything", "mean_over_rows_then_sum", "scaled_mean"),
        *("mean_with_a_penalty", "difference_of_means", "sum_by_its_rows"),
        *("sum_by_its_size", "of_keras"),
    ],
    "SUM": ["sum", "sum_by_a_constant", "sum_by_features", "rows", "half_the_squares"],
    "NOTHING": ["weights_only"],
    "UNKNOWN": ["mean_and_sum", "root_of_a_mean", "largest", "product", "masked"],
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ranks]:
    found = [
        Job("kinds", 1, "row_reduction.py"),
        Job("unknown", 2, "input_gradients.py"),
        Job("by_hand", 2, "unowned_variable.py"),
        Job("by_an_optimizer", 2, "unowned_variable.py", ("optimizer",)),
    ]
    folder = tmp_path_factory.mktemp("input-gradients")
    return Jobs(folder, found, timeout_s=100, must_succeed=True)


def test_kinds_of_numbers(jobs: Mapping[str, Ranks]) -> None:
    lines = jobs["kinds"].outputs[0].splitlines()
    kinds = json.loads(next(line for line in lines if line.startswith("{")))
    assert kinds == {name: kind for kind, names in KINDS.items() for name in names}


def test_the_gradient_of_another_number_is_pointed_out(
    jobs: Mapping[str, Ranks],
) -> None:
    lines = (PROGRAMS / "input_gradients.py").read_text().splitlines()
    place = 1 + next(i for i, line in enumerate(lines) if "gradient(number" in line)
    chief = jobs["unknown"].outputs[0]
    text = f"input_gradients.py:{place}: this gradient with respect to the rows"
    assert chief.count(text) == 1


def test_a_variable_that_is_set_by_its_gradient_is_pointed_out(
    jobs: Mapping[str, Ranks],
) -> None:
    lines = (PROGRAMS / "unowned_variable.py").read_text().splitlines()
    place = 1 + next(i for i, line in enumerate(lines) if "tape.gradient" in line)
    text = "gradients of variables that no optimizer applies"
    (said,) = (line for line in jobs["by_hand"].outputs[0].splitlines() if text in line)
    assert f"unowned_variable.py:{place}: Variable:0." in said
    assert text not in jobs["by_an_optimizer"].outputs[0]
