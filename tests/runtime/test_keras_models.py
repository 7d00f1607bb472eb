"""Ranks train the same as one process: ``programs/cases/models.py``."""

from __future__ import annotations

from tests.runtime.keras_checks import (
    MARKS,
    compare,
    equal_of,
)
from tests.runtime.keras_jobs import Compared, at_each_size

pytestmark = MARKS


@at_each_size(equal_of("models"))
def test_ranks_train_what_one_process_trains(compared: Compared) -> None:
    compare(compared)
