"""Tests of the replay of events into the state of a run."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.kit.json_formats import assert_format
from tfcluster.base.states import RunState, TaskState
from tfcluster.record.replay import Replay, replay

T = 1795169700.0
RUN = "digits-20261120-101500-3f2a"
PLAN = {
    "name": "digits",
    "backend": "local",
    "hosts": [{"host": "node1", "slots": 2, "gpus": 0}],
    "tasks": [
        {
            "task": f"worker:{i}",
            "host": "node1",
            "address": "node1:auto",
            "log": f"l{i}",
        }
        for i in range(2)
    ],
}

Event = dict[str, Any]


def _run(**extra: Any) -> Event:
    return {
        "t": T,
        "type": "run",
        "run": RUN,
        "name": "digits",
        "named": True,
        "backend": "local",
        "pid": 4711,
        "boot_id": "b",
        "start_time": 99,
        "host": "h1",
        "argv": [],
        "version": "0",
        "started": T,
        **extra,
    }


def _task(task: str, state: str | None, t: float = T, **extra: Any) -> Event:
    event = {"t": t, "type": "task", "task": task, "attempt": 0, **extra}
    return event if state is None else {**event, "state": state}


def test_status_json_is_as_the_contract_says() -> None:
    events = [
        _run(),
        _task("worker:0", "starting", address="node1:40003"),
        _task("worker:0", "running", pid=4711),
        {"t": T + 1, "type": "state", "state": "running"},
    ]
    progress = {"t": T, "tasks": {"worker:0": {"step": 1200, "steps_per_s": 41.5}}}
    answer = replay(PLAN, events, progress).to_json()
    tasks = answer["tasks"]
    wanted = {
        "schema": 1,
        "run": RUN,
        "name": "digits",
        "backend": "local",
        "state": "running",
        "exit_code": None,
        "started": "2026-11-20T10:15:00Z",
        "ended": None,
        "first_failure": None,
    }
    assert list(answer)[:10] == [*wanted, "tasks"]
    assert wanted.items() <= answer.items()
    first = {
        "task": "worker:0",
        "host": "node1",
        "address": "node1:40003",
        "state": "running",
        "pid": 4711,
        "attempt": 0,
        "exit_code": None,
        "signal": None,
        "step": 1200,
        "steps_per_s": 41.5,
        "log": "l0",
    }
    assert first.items() <= tasks[0].items()
    assert list(tasks[0])[: len(first)] == list(first)
    assert [task["task"] for task in tasks] == ["worker:0", "worker:1"]
    assert tasks[1]["state"] == "pending"
    json.dumps(answer, allow_nan=False)
    assert_format("status", answer)


def test_without_plan_or_events_there_is_still_a_view() -> None:
    assert replay({}, []).state is RunState.STARTING
    view = replay({}, [_run(), _task("ps:0", "running", host="h9")])
    assert [(t.task, t.host, t.state) for t in view.tasks] == [
        ("ps:0", "h9", TaskState.RUNNING)
    ]


def test_the_end_decides() -> None:
    end = {"t": T + 9, "type": "end", "state": "failed", "exit_code": 1}
    late = {"t": T + 10, "type": "state", "state": "running"}
    view = replay(PLAN, [_run(), end, late])
    assert (view.state, view.exit_code) == (RunState.FAILED, 1)
    assert view.to_json()["ended"] == "2026-11-20T10:15:09Z"


def test_the_first_failure_is_the_one_that_is_no_victim() -> None:
    failure = {"t": T, "type": "failure", "host": "node1", "cause": "c", "log": "l"}
    victim = {**failure, "task": "worker:0", "secondary": True, "signal": "SIGABRT"}
    first = {**failure, "task": "worker:1", "exit_code": 3, "log_tail": ["a", "b"]}
    for events in ([victim, first], [first, victim]):
        view = replay(PLAN, events)
        assert view.first_failure
        assert view.to_json()["first_failure"] == {
            "task": "worker:1",
            "host": "node1",
            "exit_code": 3,
            "signal": None,
            "cause": "c",
            "log_tail": ["a", "b"],
            "log": "l",
        }
        assert [each.task for each in view.secondary] == ["worker:0"]


def test_after_a_restart_the_latest_failure_counts_and_none_if_all_went_well() -> None:
    failures = [
        {"t": T, "type": "failure", "task": f"worker:{i}", "cause": "c"} for i in (0, 1)
    ]
    view = replay(PLAN, failures)
    assert view.first_failure
    assert view.first_failure.task == "worker:1"
    end = {"t": T, "type": "end", "state": "succeeded", "exit_code": 0}
    view = replay(PLAN, [*failures, end])
    assert view.first_failure is None
    assert len(view.secondary) == 2


def test_a_new_attempt_begins_anew_and_news_of_the_old_one_is_no_news() -> None:
    events = [
        _task("worker:0", "failed", attempt=0, exit_code=3, pid=1, phase="joining"),
        _task("worker:0", "starting", attempt=1, address="node1:5"),
        _task("worker:0", "stopped", attempt=0, exit_code=9),
    ]
    task = replay(PLAN, events).tasks[0]
    assert (task.state, task.attempt) == (TaskState.STARTING, 1)
    assert (task.exit_code, task.pid, task.phase) == (None, None, None)
    assert (task.address, task.log, task.host) == ("node1:5", "l0", "node1")


def test_a_phase_lasts_until_the_state_changes() -> None:
    replaying = Replay(PLAN)
    replaying.add(_task("worker:0", "starting", T))
    replaying.add(_task("worker:0", None, T + 1, phase="importing tensorflow"))
    replaying.add(_task("worker:0", None, T + 2, pid=7))
    task = replaying.view().tasks[0]
    assert (task.phase, task.since_s, task.pid) == ("importing tensorflow", T + 1, 7)
    replaying.add(_task("worker:0", "running", T + 3))
    task = replaying.view().tasks[0]
    assert (task.phase, task.since_s) == (None, T + 3)


def test_states_never_move_backwards_within_an_attempt() -> None:
    dice = random.Random(1)
    words = [str(state) for state in TaskState]
    for _ in range(300):
        replaying, before = Replay(PLAN), TaskState.PENDING
        for _ in range(12):
            replaying.add(_task("worker:0", dice.choice(words)))
            now = replaying.view().tasks[0].state
            assert now.order >= before.order
            assert now is before or not before.final
            before = now


def test_the_same_however_it_is_cut() -> None:
    events = [_run(), _task("worker:0", "running"), _task("worker:1", "failed")]
    replaying = Replay(PLAN)
    for number, event in enumerate(events, 1):
        replaying.add(event)
        assert replaying.view() == replay(PLAN, events[:number])


@pytest.mark.parametrize("junk", [None, "x", 1, -1.5, True, [], {}, float("nan"), [{}]])
def test_values_of_the_wrong_type_count_as_not_given(junk: object) -> None:
    events: list[Event] = []
    for event in (
        _run(),
        _task("worker:0", "running", pid=1, seconds=1.0, log="x"),
        {"t": T, "type": "host", "host": "h", "state": "ready"},
        {"t": T, "type": "failure", "task": "worker:0", "log_tail": ["x"]},
        {"t": T, "type": "swept", "count": 3},
        {"t": T, "type": "note", "text": "x"},
        {"t": T, "type": "state", "state": "running"},
        {"t": T, "type": "end", "state": "failed", "exit_code": 1},
    ):
        events += [{**event, key: junk} for key in event if key != "type"]
    progress = {"t": T, "tasks": {"worker:0": {"step": junk, "steps_per_s": junk}}}
    for plan in (PLAN, {**PLAN, "tasks": junk, "hosts": junk, "name": junk}):
        view = replay(plan, events, progress)
        json.dumps(view.to_json(), allow_nan=False)
    replay(PLAN, [], {"t": T, "tasks": junk})
    replay(PLAN, [], {"t": T, "tasks": {"worker:0": junk}})


def test_unknown_events_and_states_change_nothing() -> None:
    events = [_run(), {"t": T, "type": "new"}, _task("worker:0", "dancing")]
    assert replay(PLAN, events) == replay(PLAN, events[:1])


def test_hosts_sweeps_and_notes_are_kept() -> None:
    events = [
        {"t": T, "type": "host", "host": "node1", "state": "failed", "cause": "no"},
        {"t": T, "type": "host", "host": "node7", "state": "ready"},
        {"t": T, "type": "swept", "host": "node1", "count": 2},
        {"t": T, "type": "swept", "host": "node7", "count": 1},
        {"t": T, "type": "note", "text": "hello"},
    ]
    view = replay(PLAN, events)
    assert [(h.host, h.state, h.cause) for h in view.hosts] == [
        ("node1", "failed", "no"),
        ("node7", "ready", None),
    ]
    assert (view.swept, view.notes) == (3, ("hello",))


def test_where_fit_is_and_what_a_task_uses_come_from_the_progress() -> None:
    told = {
        "step": 63,
        "steps_per_s": 2.0,
        "epoch": 3,
        "epochs": 12,
        "epoch_step": 17,
        "epoch_steps": 23,
        "metrics": {"loss": 0.5, "mae": None},
        "rss_bytes": 7000,
        "cpu_s": 1.5,
    }
    plan = {"tasks": [{"task": "worker:0"}]}
    (task,) = replay(plan, [], {"tasks": {"worker:0": told}}).tasks
    found = task.to_json()
    assert found["fit"] == {
        "epoch": 3,
        "epochs": 12,
        "epoch_step": 17,
        "epoch_steps": 23,
    }
    assert found["metrics"] == {"loss": 0.5, "mae": None}
    assert (found["rss_bytes"], found["cpu_s"]) == (7000, 1.5)
    assert found["left_s"] == 106.5
    odd: dict[str, object] = {key: [] for key in told}
    (task,) = replay(plan, [], {"tasks": {"worker:0": odd}}).tasks
    assert (task.fit, task.metrics, task.left_s) == (None, {}, None)
