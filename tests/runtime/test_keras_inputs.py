"""Ranks train the same as one process: ``programs/cases/inputs.py``."""

from __future__ import annotations

import pytest

from tests.runtime.keras_checks import (
    MARKS,
    assert_equal_on_all_ranks,
    compare,
    equal_of,
)
from tests.runtime.keras_jobs import CASES, Compared, Outcomes, at_each_size

pytestmark = MARKS


@at_each_size(equal_of("inputs"))
def test_ranks_train_what_one_process_trains(compared: Compared) -> None:
    compare(compared)


@at_each_size(["without_a_fixed_order"])
def test_a_dataset_without_a_fixed_order_trains(compared: Compared) -> None:
    assert_equal_on_all_ranks(compared.ranks)


@pytest.mark.slow
def test_datasets_are_saved_by_the_chief_and_cached_by_each(outcomes: Outcomes) -> None:
    size = CASES["cached_in_files"][1][0]
    folder = outcomes.folder_of("cached_in_files")
    caches = {path.name for path in folder.glob("cached*.index")}
    others = {f"cached.rank{rank}.index" for rank in range(1, size)}
    assert caches == {"cached.index", *others}
    assert not list(folder.glob("saved.rank*"))
