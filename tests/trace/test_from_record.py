"""What the events of a record say about the start, attempts, stalls and failures."""

from __future__ import annotations

from typing import Any

from tests.trace.rules import Trace
from tfcluster.trace.spans import (
    Item,
    Moment,
    Process,
    Span,
    host_items,
    launcher_items,
    pieces,
    task_items,
)

NOW_US = 100_000_000


def _at(t: float, kind: str, **keys: Any) -> dict[str, Any]:
    return {"t": t, "type": kind, **keys}


def _task(t: float, state: str | None = None, **keys: Any) -> dict[str, Any]:
    known = {"task": "worker:0", "attempt": 0, **keys}
    return _at(t, "task", **known, **({"state": state} if state else {}))


def _spans(items: list[Item]) -> list[tuple[str, float, float]]:
    return [
        (item.name, item.began_us / 1e6, item.ended_us / 1e6)
        for item in items
        if isinstance(item, Span)
    ]


def _moments(items: list[Item]) -> list[tuple[str, float]]:
    return [(i.name, i.at_us / 1e6) for i in items if isinstance(i, Moment)]


def test_the_states_of_a_run() -> None:
    items = launcher_items(
        [
            _at(1.1, "run", started=1.0),
            _at(3.0, "state", state="running"),
            _at(4.0, "note", text="hello"),
            _at(5.0, "failure", task="worker:0", cause="exit 1"),
            _at(6.0, "state", state="stopping"),
            _at(7.0, "end", state="failed"),
        ],
        NOW_US,
    )
    assert _spans(items) == [
        ("starting", 1.0, 3.0),
        ("running", 3.0, 6.0),
        ("stopping", 6.0, 7.0),
    ]
    assert _moments(items) == [("hello", 4.0), ("failure", 5.0)]


def test_what_is_not_over_lasts_until_now() -> None:
    assert _spans(launcher_items([_at(1.0, "run", started=1.0)], NOW_US)) == [
        ("starting", 1.0, 100.0)
    ]
    assert launcher_items([], NOW_US) == []
    host = [_at(2.0, "host", host="h1", state="starting")]
    assert _spans(host_items(host, "h1", NOW_US)) == [("wait for its turn", 2.0, 100.0)]
    stage = _at(9.0, "stage", host="h1", stage="connect", began=8.0)
    assert _spans(host_items([*host, stage], "h1", NOW_US)) == [
        ("wait for its turn", 2.0, 8.0),
        ("connect", 8.0, 100.0),
    ]
    assert _spans(task_items([_task(3.0, "starting")], "worker:0", NOW_US)) == [
        ("attempt 0", 3.0, 100.0),
        ("spawn", 3.0, 100.0),
    ]


def test_the_stages_of_a_host_end_when_it_is_ready() -> None:
    items = host_items(
        [
            _at(1.0, "host", host="h1", state="starting"),
            _at(1.0, "host", host="h2", state="starting"),
            _at(2.0, "stage", host="h1", stage="connect", began=1.5),
            _at(2.0, "stage", host="h1", stage="start the agent", began=1.9),
            _at(3.0, "stage", host="h1", stage="import TensorFlow"),
            _at(3.5, "stage", host="h2", stage="connect"),
            _at(8.0, "host", host="h1", state="ready"),
            _at(20.0, "host", host="h1", state="closed"),
        ],
        "h1",
        NOW_US,
    )
    assert _spans(items) == [
        ("wait for its turn", 1.0, 1.5),
        ("connect", 1.5, 1.9),
        ("start the agent", 1.9, 3.0),
        ("import TensorFlow", 3.0, 8.0),
    ]


def test_the_attempts_of_a_task() -> None:
    items = task_items(
        [
            _task(1.0, phase="importing tensorflow"),
            _task(2.0, "starting"),
            _task(2.5, "running", pid=7),
            _task(3.0, phase="joining"),
            _task(5.0, "failed", exit_code=1),
            _at(5.1, "failure", task="worker:0", cause="exit 1"),
            _at(5.1, "failure", task="worker:1", cause="exit 1"),
            _task(6.0, "starting", attempt=1),
            _task(6.5, "running", attempt=1),
            _task(9.0, "stopping", attempt=1),
            _task(9.5, "stopped", attempt=1),
        ],
        "worker:0",
        NOW_US,
    )
    assert _spans(items) == [
        ("attempt 0", 2.0, 5.0),
        ("spawn", 2.0, 2.5),
        ("attempt 1", 6.0, 9.5),
        ("spawn", 6.0, 6.5),
        ("stop", 9.0, 9.5),
    ]
    assert _moments(items) == [
        ("joining", 3.0),
        ("restart: attempt 1", 6.0),
        ("failure", 5.1),
    ]
    assert items[0].args == {"state": "failed", "exit_code": 1, "pid": 7}


def test_reports_of_one_stall_are_one_span() -> None:
    def waiting(t: float, since_s: float) -> dict[str, Any]:
        keys = {"task": "worker:0", "attempt": 0, "what": "gradients", "for": [1]}
        return _at(t, "waiting", since_s=since_s, **keys)

    items = task_items(
        [waiting(70.0, 60.0), waiting(130.0, 120.0), waiting(300.0, 60.0)],
        "worker:0",
        NOW_US,
    )
    assert _spans(items) == [
        ("waits in gradients", 10.0, 130.0),
        ("waits in gradients", 240.0, 300.0),
    ]
    assert items[0].args == {"for ranks": [1]}


def test_a_clock_that_was_set_back_gives_no_negative_times() -> None:
    events = [
        _task(20.0, "starting"),
        _task(18.0, "running"),
        _task(12.0, "failed"),
        _at(11.0, "failure", task="worker:0"),
        _at(13.0, "waiting", task="worker:0", since_s=1e305, what="x"),
    ]
    items = tuple(task_items(events, "worker:0", NOW_US))
    Trace("".join(pieces([Process("worker:0", items)], 12_000_000, {})))
