"""How the cores of hosts are divided among ranks."""

from __future__ import annotations

import pytest

from tests.planning.descriptions import describe, hosts
from tfcluster.compose import TaskSpec, compose
from tfcluster.launcher.cores import crowding, threads_env
from tfcluster.placement import place
from tfcluster.protocol.wire import INTRA_OP_THREADS


def specs(workers: int, *slots: int) -> tuple[TaskSpec, ...]:
    description = describe({"worker": workers, "ps": 1})
    places = place(description, hosts(*slots))
    return compose(description, places, lambda program: False)


@pytest.mark.parametrize(
    ("workers", "slots", "cpus", "expected"),
    [
        (2, (3,), {"h1": 8}, "4"),
        (3, (4,), {"h1": 8}, "2"),
        (3, (4,), {"h1": 2}, "1"),
        (3, (2, 2), {"h1": 8, "h2": 6}, "4"),
        (3, (2, 2), {"h1": 8, "h2": 2}, "2"),
        (2, (1, 2), {"h1": 8, "h2": 8}, None),
        (2, (3,), {"h1": 0}, None),
        (2, (3,), {}, None),
    ],
)
def test_all_ranks_have_the_threads_of_the_smallest_share(
    workers: int, slots: tuple[int, ...], cpus: dict[str, int], expected: str | None
) -> None:
    found = threads_env(specs(workers, *slots), cpus)
    assert found == ({} if expected is None else {INTRA_OP_THREADS: expected})


def test_one_note_is_made_of_more_ranks_than_cores() -> None:
    assert crowding(specs(4, 2, 3), {"h1": 2, "h2": 2}) is None
    assert crowding(specs(4, 2, 3), {}) is None
    note = crowding(specs(4, 2, 3), {"h1": 1, "h2": 1})
    assert note is not None
    assert "2 ranks share 1 core of h1, and alike on 1 other host: each" in note
