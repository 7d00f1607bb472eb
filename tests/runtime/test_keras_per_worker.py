"""Ranks train the same as one process: ``programs/cases/per_worker.py``."""

from __future__ import annotations

from tests.runtime.keras_checks import MARKS, compare
from tests.runtime.keras_jobs import PER_WORKER_CASES, Compared, at_each_size

pytestmark = MARKS


@at_each_size(PER_WORKER_CASES)
def test_batches_per_worker_are_parts_of_a_larger_one(compared: Compared) -> None:
    compare(compared)
