"""Ranks train the same as one process: ``programs/cases/models.py``."""

from __future__ import annotations

import numpy as np

from tests.runtime.keras_checks import (
    MARKS,
    STATISTICAL,
    assert_equal_on_all_ranks,
    compare,
    equal_of,
)
from tests.runtime.keras_jobs import Compared, at_each_size

pytestmark = MARKS


@at_each_size(equal_of("models"))
def test_ranks_train_what_one_process_trains(compared: Compared) -> None:
    compare(compared)


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
