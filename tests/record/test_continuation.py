"""Runs that continue each other are linked, and share a budget of restarts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tfcluster.record.continuation import (
    Earlier,
    earlier,
    find_waiting,
    first,
    latest,
    link,
    successor,
    was_requeued,
)
from tfcluster.record.events import Writer
from tfcluster.record.files import replace_json
from tfcluster.record.paths import RunPaths, create_run
from tfcluster.record.run_locks import remove_run

T = 1795169700.0


def begun(state: Path, after_s: float, *events: dict[str, Any]) -> RunPaths:
    """A run whose record has these events after its first one."""
    paths = create_run(state, "digits", T + after_s)
    writer = Writer(paths)
    for event in ({"type": "run", "run": paths.run}, *events):
        writer.append(event)
    assert writer.close(10)
    return paths


def requeued(count: int, *restarts: float, job: str = "7") -> dict[str, Any]:
    known = {"job": job, "count": count, "restarts": list(restarts)}
    return {"type": "requeued", **known}


def test_a_run_gets_what_the_runs_before_have_left(tmp_path: Path) -> None:
    one = begun(tmp_path, 0, requeued(1, T + 5))
    assert earlier(one) == Earlier()
    two = begun(tmp_path, 10)  # preempted: it has no event of its own
    link(one, two)
    three = begun(tmp_path, 20, requeued(2, T + 5, T + 25))
    link(two, three)
    four = begun(tmp_path, 30)
    link(three, four)
    assert earlier(two) == earlier_than(one, 1, T + 5)
    assert earlier(three) == earlier_than(two, 1, T + 5)
    assert earlier(four) == earlier_than(three, 2, T + 5, T + 25)
    assert latest(one) == latest(four) == four
    assert first(four) == first(one) == one


def earlier_than(run: RunPaths, requeues: int, *restarts: float) -> Earlier:
    return Earlier(run=run.run, requeues=requeues, restarts=restarts)


def test_only_recent_restarts_count() -> None:
    known = Earlier(restarts=(T, T + 50))
    assert known.counted(T + 70, None) == (T, T + 50)
    assert known.counted(T + 70, 60.0) == (T + 50,)


def test_a_refused_requeue_is_none(tmp_path: Path) -> None:
    refused = {"type": "requeued", "job": "7", "refused": "no"}
    assert not was_requeued(begun(tmp_path, 0, requeued(1, T), refused))
    assert was_requeued(begun(tmp_path, 1, requeued(1, T)))


def test_the_waiting_run_of_a_job_is_found(tmp_path: Path) -> None:
    waiting = begun(tmp_path, 0, requeued(1, T))
    replace_json(waiting.job, {"job": "7", "backend": "slurm"})
    begun(tmp_path, 5)
    assert find_waiting(tmp_path, "7", "digits") == waiting
    assert find_waiting(tmp_path, "8", "digits") is None
    assert find_waiting(tmp_path, "7", "other") is None
    link(waiting, begun(tmp_path, 10))
    assert find_waiting(tmp_path, "7", "digits") is None, "it goes on already"


def test_a_removed_run_ends_the_chain(tmp_path: Path) -> None:
    one, two = begun(tmp_path, 0), begun(tmp_path, 10)
    link(one, two)
    assert successor(one) == two
    assert remove_run(two)
    assert successor(one) is None
    assert latest(one) == one
    three = begun(tmp_path, 20)
    link(two, three)
    assert earlier(three).run == two.run


@pytest.mark.parametrize("run", ["../digits", "", "..", 7, None, "/etc", "a\0b"])
def test_a_damaged_link_leads_nowhere(tmp_path: Path, run: object) -> None:
    paths = begun(tmp_path, 0)
    (tmp_path / "digits").mkdir()
    replace_json(paths.next, {"run": run})
    assert successor(paths) is None
    replace_json(paths.next, {"run": paths.run})
    assert latest(paths) == paths, "a circle ends"
