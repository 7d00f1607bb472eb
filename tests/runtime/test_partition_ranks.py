"""Real ranks that divide functions train what one process trains.

With ``TFCLUSTER_PARTITION=strict`` a function that cannot be divided is an error.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.runtime.keras_checks import (
    MARKS,
    assert_equal_on_all_ranks,
    assert_equal_to_one,
)
from tests.runtime.keras_jobs import LIMIT_S, Values
from tests.runtime.ranks import Job, Jobs

pytestmark = MARKS

CASES = {
    "inputs": ("fit", "batches_of_one"),
    "models": (
        *("embedding", "batch_normalization", "several_steps_per_execution"),
        *("custom_step_that_draws_a_fixed_number", "lstm_masked"),
    ),
    "loops": ("tape_graph", "tape_on_arrays", "gan"),
    "losses": ("masked_sum", "function_of_a_batch"),
    "states": ("kept_by_a_layer",),
    "row_terms": ("step_with_a_mask", "loop_with_a_selection"),
    "sums": ("step_that_sums",),
}
"""Cases by theme; those of the last two are refused where batches are divided."""
SIZE = 2


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Jobs]:
    folder = tmp_path_factory.mktemp("divided")
    found = []
    for theme, cases in CASES.items():
        for name, size in (("one", 1), ("ranks", SIZE)):
            job = f"{theme}-{name}"
            words = (str(folder / job), *cases)
            env = {"TFCLUSTER_PARTITION": "strict"} if size > 1 else {}
            script = f"cases/{theme}.py"
            found.append(Job(job, size, script, words, env, keep=size == 1))
    for name, size in (("one", 1), ("ranks", SIZE)):
        env = {"TFCLUSTER_PARTITION": "strict"} if size > 1 else {}
        words = (str(folder / f"threads-{name}"),)
        script = "partition_threads.py"
        found.append(Job(f"threads-{name}", size, script, words, env, keep=size == 1))
    return folder, Jobs(folder, found, LIMIT_S, must_succeed=True)


def values(folder: Path, job: str, rank: int) -> Values:
    return dict(np.load(folder / f"{job}-{rank}.npz"))


@pytest.mark.parametrize("theme", [*CASES, "threads"])
def test_divided_functions_train_the_same(jobs: tuple[Path, Jobs], theme: str) -> None:
    folder, ranks = jobs
    assert ranks[f"{theme}-one"]
    assert ranks[f"{theme}-ranks"]
    found = [values(folder, f"{theme}-ranks", rank) for rank in range(SIZE)]
    one = values(folder, f"{theme}-one", 0)
    assert not [key for key in (*one, *found[0]) if key.endswith("/error")]
    assert_equal_on_all_ranks(found)
    assert_equal_to_one(one, found[0])
