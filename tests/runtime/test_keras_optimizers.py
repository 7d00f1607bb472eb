"""Ranks train the same as one process: ``programs/cases/optimizers.py``."""

from __future__ import annotations

import numpy as np

from tests.runtime.keras_checks import MARKS, compare, equal_of
from tests.runtime.keras_jobs import Compared, at_each_size

pytestmark = MARKS


@at_each_size(equal_of("optimizers"))
def test_ranks_train_what_one_process_trains(compared: Compared) -> None:
    compare(compared)


@at_each_size(["mixed_bfloat16"])
def test_bfloat16_rounds_in_its_own_way(compared: Compared) -> None:
    compare(compared, tolerance=1e-2)


@at_each_size(["mixed_precision", "overflow", "sum_overflows"])
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


@at_each_size(["sum_overflows"])
def test_the_scale_follows_the_sum_of_all_rows(compared: Compared) -> None:
    assert len(set(compared.one["scales"])) > 1
    np.testing.assert_array_equal(compared.ranks[0]["scales"], compared.one["scales"])
