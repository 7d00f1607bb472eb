"""A gradient that another thread computes is that of the whole batch on every rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.kit.ranks import Job, Jobs
from tests.runtime.keras_checks import (
    MARKS,
    assert_equal_on_all_ranks,
    assert_equal_to_one,
)
from tests.runtime.keras_jobs import LIMIT_S, STRICT, Values

pytestmark = MARKS


def test_a_gradient_of_another_thread_is_the_same(tmp_path: Path) -> None:
    envs: list[tuple[str, int, dict[str, str]]] = [("one", 1, {}), ("ranks", 2, STRICT)]
    jobs = [
        Job(name, size, "partition_threads.py", (str(tmp_path / name),), env)
        for name, size, env in envs
    ]
    ended = Jobs(tmp_path, jobs, LIMIT_S, must_succeed=True)
    assert ended["one"]
    assert ended["ranks"]
    found: list[Values] = [
        dict(np.load(tmp_path / f"ranks-{rank}.npz")) for rank in range(2)
    ]
    assert_equal_on_all_ranks(found)
    assert_equal_to_one(dict(np.load(tmp_path / "one-0.npz")), found[0])
