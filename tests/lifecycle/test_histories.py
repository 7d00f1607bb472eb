"""Tests of the lifecycle: first failure, order of stops, and exit code."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from tests.lifecycle.histories import (
    CHIEF,
    EVALUATOR,
    PS,
    W0,
    W1,
    History,
    closing,
    deadlines,
    plan,
    replans,
    started,
    stopped,
)
from tfcluster.base.errors import ExitCode
from tfcluster.base.states import RunState, TaskState
from tfcluster.base.task_id import TaskId
from tfcluster.lifecycle import begin, step
from tfcluster.lifecycle.actions import (
    Action,
    DropHosts,
    Failure,
    Say,
    SetDeadline,
    SetRunState,
)
from tfcluster.lifecycle.events import (
    AgentAskedToStop,
    Event,
    Expired,
    HostClosed,
    HostFailed,
    HostLost,
    HostReady,
    Interrupted,
    LauncherFault,
    Replanned,
    Stalled,
    TaskExited,
    TaskListening,
    TaskSettled,
    TaskStarted,
    TaskUnstartable,
)
from tfcluster.lifecycle.state import HostState, Phase


def test_nothing_starts_before_every_host_is_ready() -> None:
    history = History(plan(CHIEF, W0, hosts=("h1", "h2")))
    assert started(history.feed(HostReady("h1"))) == []
    assert started(history.feed(HostReady("h2"))) == [CHIEF, W0]


def test_success_needs_every_training_task() -> None:
    history = History(plan(CHIEF, W0, W1))
    history.up()
    history.exits(CHIEF)
    history.exits(W1)
    assert history.state.phase is Phase.TRAINING
    assert closing(history.exits(W0))
    history.closed()
    assert history.code is ExitCode.OK
    assert history.run_states == [
        RunState.STARTING,
        RunState.RUNNING,
        RunState.STOPPING,
        RunState.SUCCEEDED,
    ]
    assert history.task_states(W0) == [
        TaskState.STARTING,
        TaskState.RUNNING,
        TaskState.SUCCEEDED,
    ]


def test_servers_are_stopped_after_the_training_and_before_the_agents() -> None:
    history = History(plan(W0, PS))
    history.up()
    actions = history.exits(W0)
    assert stopped(actions) == [(PS, "TERM")]
    assert not closing(actions)
    assert closing(history.obey(PS))
    history.closed()
    assert history.code is ExitCode.OK
    assert history.task_states(PS)[-1] is TaskState.STOPPED


def test_a_run_counts_as_running_once_its_servers_listen() -> None:
    history = History(plan(W0, PS))
    history.feed(HostReady("h1"), TaskStarted(W0, 0), TaskStarted(PS, 0))
    assert RunState.RUNNING not in history.run_states
    history.feed(TaskListening(PS, 0))
    assert RunState.RUNNING in history.run_states


def test_a_server_that_ends_by_itself_is_a_failure_even_with_code_0() -> None:
    history = History(plan(W0, PS))
    history.up()
    history.exits(PS)
    assert stopped(history.judged()) == [(W0, "TERM")]
    assert history.verdict is not None
    assert history.verdict.cause == "exited before training ended"


def test_the_evaluator_may_finish_after_the_training() -> None:
    history = History(plan(W0, EVALUATOR, PS))
    history.up()
    actions = history.exits(W0)
    assert stopped(actions) == [(PS, "TERM")]
    assert "evaluator" in deadlines(actions)
    history.obey(PS)
    assert closing(history.exits(EVALUATOR))
    history.closed()
    assert history.code is ExitCode.OK


def test_an_evaluator_that_does_not_finish_is_stopped() -> None:
    history = History(plan(W0, EVALUATOR))
    history.up()
    history.exits(W0)
    assert stopped(history.feed(Expired("evaluator"))) == [(EVALUATOR, "TERM")]
    history.obey(EVALUATOR)
    history.closed()
    assert history.code is ExitCode.OK


def test_an_evaluator_that_fails_is_only_a_warning() -> None:
    history = History(plan(W0, EVALUATOR))
    history.up()
    actions = history.exits(EVALUATOR, 1)
    assert any(isinstance(a, Say) and "warning" in a.text for a in actions)
    history.exits(W0)
    history.closed()
    assert history.code is ExitCode.OK


def test_the_first_failure_ends_the_run_servers_last() -> None:
    history = History(plan(CHIEF, W0, PS))
    history.up()
    assert stopped(history.exits(W0, 33)) == []
    assert stopped(history.judged()) == [(CHIEF, "TERM")]
    assert stopped(history.obey(CHIEF)) == [(PS, "TERM")]
    assert closing(history.obey(PS))
    history.closed()
    assert history.code == 33
    assert history.verdict is not None
    assert (history.verdict.task, history.verdict.exit_code) == (W0, 33)
    assert history.task_states(CHIEF)[-1] is TaskState.STOPPED


@pytest.mark.parametrize("order", list(itertools.permutations([CHIEF, W0, W1])))
def test_the_killed_task_is_blamed_and_not_its_peers_that_lost_it(
    order: tuple[TaskId, ...],
) -> None:
    history = History(plan(CHIEF, W0, W1))
    history.up()
    for task in order:
        if task == CHIEF:
            history.exits(task, None, signal="SIGKILL")
        else:
            lost = TaskExited(
                task=task, attempt=0, code=1, cause="PeerLostError", victim=True
            )
            history.feed(lost)
    history.judged()
    assert history.verdict is not None
    assert history.verdict.task == CHIEF
    failures = [a for a in history.actions if isinstance(a, Failure)]
    assert [f.secondary for f in failures] == [False, True, True]


def test_who_ended_first_is_blamed_though_the_news_comes_last() -> None:
    history = History(plan(CHIEF, W0))
    history.up()
    for task, at_s in ((W0, 5.3), (CHIEF, 5.1)):
        history.feed(TaskExited(task=task, attempt=0, code=1, cause="x", at_s=at_s))
    history.judged()
    assert history.verdict is not None
    assert history.verdict.task == CHIEF


def test_failures_after_the_verdict_are_secondary() -> None:
    history = History(plan(CHIEF, W0))
    history.up()
    history.exits(W0, 3)
    history.judged()
    actions = history.exits(CHIEF, 1)
    assert [a.secondary for a in actions if isinstance(a, Failure)] == [True]
    history.closed()
    assert history.code == ExitCode.TASK_FAILED


# --- restarts -------------------------------------------------------------------------


def test_a_group_restarts_together_and_only_when_all_have_ended() -> None:
    history = History(plan(CHIEF, W0, PS, max_restarts=1))
    history.up()
    history.exits(W0, 1)
    actions = history.judged()
    assert set(stopped(actions)) == {(CHIEF, "TERM"), (PS, "TERM")}
    assert started(history.obey(CHIEF)) == []
    assert started(history.obey(PS)) == [CHIEF, W0, PS]
    assert {s.attempt for s in history.state.tasks.values()} == {1}
    history.up()
    history.exits(CHIEF)
    history.exits(W0)
    history.obey(PS)
    history.closed()
    assert history.code is ExitCode.OK


def test_a_task_restarts_alone_where_tasks_are_independent() -> None:
    history = History(plan(CHIEF, W0, max_restarts=2, restart_alone=True))
    history.up()
    history.exits(W0, None, signal="SIGKILL")
    actions = history.judged()
    assert stopped(actions) == []
    assert started(actions) == [W0]
    assert history.state.tasks[CHIEF].attempt == 0
    assert history.state.tasks[W0].attempt == 1


def test_all_restart_with_the_one_that_keeps_what_they_have_come_to() -> None:
    alone = plan(CHIEF, W0, PS, max_restarts=1, restart_alone=True)
    history = History(replace(alone, keepers=frozenset({PS})))
    history.up()
    history.exits(PS, None, signal="SIGKILL")
    history.exits(W0, 1)
    assert [task for task, _ in stopped(history.judged())] == [CHIEF]
    history.obey(CHIEF)
    states = history.state.tasks
    assert {task: states[task].attempt for task in (CHIEF, W0, PS)} == {
        CHIEF: 1,
        W0: 1,
        PS: 1,
    }


def test_the_restarts_are_used_up_at_some_point() -> None:
    history = History(plan(W0, max_restarts=1))
    history.up()
    history.exits(W0, 1)
    history.judged()
    history.feed(TaskStarted(W0, 1))
    history.exits(W0, 1)
    history.judged()
    history.closed()
    assert history.code == ExitCode.TASK_FAILED


def _deadlines(actions: list[Action]) -> dict[str, float]:
    return {a.name: a.after_s for a in actions if isinstance(a, SetDeadline)}


def _fails(history: History) -> list[Action]:
    history.feed(TaskStarted(W0, history.state.tasks[W0].attempt))
    history.exits(W0, 1)
    return history.judged()


def test_only_the_restarts_of_the_last_time_count() -> None:
    often = replace(plan(W0, max_restarts=2), restart_within_s=3600.0)
    history = History(often)
    history.up()
    actions = _fails(history)
    assert _deadlines(actions) == {"restart 1": 3600.0}
    assert any(
        isinstance(a, Say) and "(restart 1 of 2 within 1h)" in a.text for a in actions
    )
    _fails(history)
    history.feed(Expired("restart 1"))
    assert started(_fails(history)) == [W0]
    actions = _fails(history)
    assert Say("giving up after 2 restarts within 1h") in actions
    history.closed()
    assert history.code == ExitCode.TASK_FAILED


def test_restarts_of_the_runs_before_count_until_they_are_too_old() -> None:
    often = replace(plan(W0, max_restarts=2), restart_within_s=3600.0)
    history = History(often, earlier=(3000.0, 10.0))
    assert _deadlines(history.actions)["restart before 0"] == 600.0
    history.up()
    history.feed(Expired("restart before 0"))
    assert started(_fails(history)) == [W0]
    assert Say("giving up after 2 restarts within 1h") in _fails(history)


def test_each_restart_waits_twice_as_long() -> None:
    patient = replace(plan(W0, max_restarts=9), backoff_s=5.0)
    history = History(patient)
    history.up()
    waits = []
    for _ in range(8):
        actions = _fails(history)
        assert started(actions) == []
        waits.append(_deadlines(actions)["backoff"])
        assert started(history.feed(Expired("backoff"))) == [W0]
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300]


def test_a_wait_cannot_overflow() -> None:
    history = History(replace(plan(W0, max_restarts=10**6), backoff_s=5.0))
    history.up()
    history.state = replace(history.state, counted=5000, restarts=5000)
    assert _deadlines(_fails(history))["backoff"] == 300.0


def test_a_restart_that_waits_gives_way_to_an_interrupt() -> None:
    history = History(replace(plan(W0, max_restarts=1), backoff_s=5.0))
    history.up()
    _fails(history)
    history.feed(Interrupted(ExitCode.INTERRUPTED))
    history.closed()
    assert history.code is ExitCode.INTERRUPTED
    assert started(history.feed(Expired("backoff"))) == []


def test_the_end_of_an_earlier_attempt_is_no_news() -> None:
    history = History(plan(CHIEF, W0, max_restarts=1, restart_alone=True))
    history.up()
    history.exits(W0, 1)
    history.judged()
    assert history.feed(TaskExited(task=W0, attempt=0, code=1)) == []


def test_a_lost_host_is_not_got_over_by_a_restart() -> None:
    history = History(plan(CHIEF, W0, hosts=("h1", "h2"), max_restarts=3))
    history.up()
    actions = history.feed(HostLost("h2", "h2 silent for 15 s"))
    assert DropHosts(("h2",)) in actions
    assert history.task_states(W0)[-1] is TaskState.LOST
    history.judged()
    history.obey(CHIEF)
    history.feed(HostClosed("h1"))
    assert history.code is ExitCode.CONTACT_LOST


# --- hosts that are lost --------------------------------------------------------------

FOUR = ("h1", "h2", "h3", "h4")
W2 = TaskId("worker", 2)


def four(**keys: Any) -> History:
    """Start a chief and three workers, each on a host of its own."""
    options = {"hosts": FOUR, "max_restarts": 2, "min_training": 3, **keys}
    history = History(plan(CHIEF, W0, W1, W2, **options))
    history.up()
    return history


def test_the_training_goes_on_on_the_hosts_that_are_left() -> None:
    history = four()
    history.feed(HostLost("h2", "contact lost: reset"))
    said = history.judged()
    assert {task for task, _ in stopped(said)} == {CHIEF, W1, W2}
    assert not closing(said)
    said = history.obey(CHIEF, W1, W2)
    assert replans(said) == [frozenset({"h1", "h3", "h4"})]
    smaller = plan(CHIEF, W0, W1, hosts=("h1", "h3", "h4"), max_restarts=2)
    assert started(history.feed(Replanned(smaller))) == [CHIEF, W0, W1]
    assert history.state.tasks[W0].attempt == 1
    assert history.task_states(W0)[-2:] == [TaskState.LOST, TaskState.STARTING]
    assert history.task_states(W2)[-1] is TaskState.STOPPED
    for task in (CHIEF, W0, W1):
        history.feed(TaskStarted(task, 1))
        history.exits(task)
    history.closed()
    assert history.code is ExitCode.OK
    assert history.run_states[-1] is RunState.SUCCEEDED


@pytest.mark.parametrize(
    "keys", [{"min_training": None}, {"min_training": 4}, {"max_restarts": 0}]
)
def test_a_lost_host_ends_the_run_where_too_few_are_left(keys: dict[str, int]) -> None:
    history = four(**keys)
    history.feed(HostLost("h2", "contact lost: reset"))
    history.judged()
    history.obey(CHIEF, W1, W2)
    assert replans(history.actions) == []
    history.closed()
    assert history.code is ExitCode.CONTACT_LOST


def test_the_loss_of_a_server_is_not_got_over() -> None:
    history = History(plan(CHIEF, W0, PS, hosts=FOUR, max_restarts=1, min_training=1))
    history.up()
    history.feed(HostLost("h3", "contact lost: reset"))
    history.judged()
    history.obey(CHIEF, W0)
    history.closed()
    assert history.code is ExitCode.CONTACT_LOST


@pytest.mark.parametrize(("least", "code"), [(2, None), (3, ExitCode.CONTACT_LOST)])
def test_another_host_is_lost_while_the_others_stop(
    least: int, code: ExitCode | None
) -> None:
    history = four(min_training=least)
    history.feed(HostLost("h2", "contact lost: reset"))
    history.judged()
    history.obey(CHIEF, W1)
    said = history.feed(HostLost("h4", "contact lost: reset"))
    if code is None:
        assert replans(said) == [frozenset({"h1", "h3"})]
    else:
        assert closing(said)
        history.closed()
    assert history.code is code


def test_victims_are_heard_of_before_the_host_that_was_lost() -> None:
    history = four()
    for task in (CHIEF, W1, W2):
        history.exits(task, 1)
    history.judged()
    assert started(history.actions) == [CHIEF, W0, W1, W2]
    assert stopped(history.actions) == [(W0, "TERM")]
    said = history.feed(HostLost("h2", "h2 silent for 15 s"))
    assert replans(said) == [frozenset({"h1", "h3", "h4"})]


def test_a_silent_host_may_still_train_until_its_lease_is_over() -> None:
    history = four()
    said = history.feed(HostLost("h2", "h2 silent for 15 s", harmless_after_s=25.0))
    assert deadlines(said)["lease h2"] == 25.0
    history.judged()
    assert replans(history.obey(CHIEF, W1, W2)) == []
    assert replans(history.feed(Expired("lease h2"))) != []


@pytest.mark.parametrize("restart_alone", [False, True])
def test_a_restart_waits_for_what_the_last_attempt_left(*, restart_alone: bool) -> None:
    history = History(plan(W0, W1, max_restarts=1, restart_alone=restart_alone))
    history.up()
    before = started(history.actions)
    history.feed(TaskExited(task=W1, attempt=0, code=3, cause="x"))
    history.judged()
    if not restart_alone:
        history.obey(W0)
    assert started(history.actions) == before
    again = started(history.feed(TaskSettled(W1, 0)))
    assert again == ([W1] if restart_alone else [W0, W1])


def test_what_a_lost_host_has_left_is_not_waited_for() -> None:
    history = four()
    history.feed(TaskExited(task=W0, attempt=0, code=3, cause="x"))
    history.feed(HostLost("h2", "contact lost: reset"))
    history.judged()
    history.obey(CHIEF, W1, W2)
    assert replans(history.actions) != []


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (ExitCode.TIME_LIMIT, "the time limit is near"),
        (ExitCode.HANGUP, "the terminal hung up"),
        (ExitCode.TERMINATED, "stop requested"),
        (ExitCode.INTERRUPTED, "interrupted"),
    ],
)
def test_the_reason_of_an_end_says_who_wanted_it(code: ExitCode, reason: str) -> None:
    history = History(plan(W0))
    history.up()
    actions = history.feed(Interrupted(code))
    assert [a.reason for a in actions if isinstance(a, SetRunState)] == [reason]
    assert any(isinstance(a, Say) and a.text.startswith(reason) for a in actions)


def test_a_new_plan_that_comes_too_late_changes_nothing() -> None:
    history = four()
    history.feed(HostLost("h2", "contact lost: reset"))
    history.judged()
    history.obey(CHIEF, W1, W2)
    history.feed(Interrupted(ExitCode.INTERRUPTED))
    before = started(history.actions)
    history.feed(Replanned(plan(CHIEF, W0, W1, hosts=("h1", "h3", "h4"))))
    assert started(history.actions) == before
    history.closed()
    assert history.code is ExitCode.INTERRUPTED


def test_a_restart_under_way_gives_way_to_an_interrupt() -> None:
    history = History(plan(CHIEF, W0, max_restarts=1))
    history.up()
    history.exits(W0, 1)
    history.judged()
    history.feed(Interrupted(ExitCode.INTERRUPTED))
    assert closing(history.obey(CHIEF))
    history.closed()
    assert history.code is ExitCode.INTERRUPTED
    assert started(history.actions) == [CHIEF, W0]


@pytest.mark.parametrize(
    "event",
    [AgentAskedToStop("h2"), HostClosed("h2"), Interrupted(ExitCode.TERMINATED)],
)
@pytest.mark.parametrize("first", [W0, W1, W2])
def test_what_a_scheduler_has_ended_has_not_failed(event: Event, first: TaskId) -> None:
    """A scheduler signals tasks, agents and the launcher in any order."""
    hosts = ("h1", "h2", "h1", "h1")
    history = History(plan(CHIEF, W0, W1, W2, hosts=hosts, max_restarts=3))
    history.up()
    exits = {
        W0: TaskExited(task=W0, attempt=0, code=None, signal="SIGTERM"),
        W1: TaskExited(task=W1, attempt=0, code=None, signal="SIGTERM"),
        # Its exchange with one of those has failed.
        W2: TaskExited(task=W2, attempt=0, code=1, cause="lost", victim=True),
    }
    history.feed(exits.pop(first), event, *exits.values())
    history.obey(CHIEF)
    history.closed()
    assert history.code is ExitCode.TERMINATED
    assert history.verdict is None
    for task in (W0, W1, W2, CHIEF):
        assert history.task_states(task)[-1] is TaskState.STOPPED
    assert started(history.actions) == [CHIEF, W0, W1, W2]


def test_what_cannot_start_any_more_has_not_failed() -> None:
    history = History(plan(W0))
    history.feed(HostReady("h1"), Interrupted(ExitCode.TERMINATED))
    history.feed(TaskUnstartable(W0, 0, "its interpreter has ended"))
    history.closed()
    assert history.code is ExitCode.TERMINATED
    assert history.verdict is None
    assert history.task_states(W0)[-1] is TaskState.STOPPED


def test_what_fails_by_itself_is_blamed_also_when_a_scheduler_ends_all() -> None:
    history = History(plan(CHIEF, W0, W1))
    history.up()
    history.exits(W0, 1)
    history.feed(AgentAskedToStop("h1"))
    assert history.verdict is not None
    assert history.verdict.task == W0


# --- start-up -------------------------------------------------------------------------


def test_a_host_that_cannot_be_made_ready_ends_the_run_before_any_task() -> None:
    history = History(plan(CHIEF, W0, hosts=("h1", "h2")))
    history.feed(HostReady("h1"), HostFailed("h2", "import tensorflow: no"))
    assert closing(history.judged())
    history.feed(HostClosed("h1"))
    assert history.code is ExitCode.START
    assert started(history.actions) == []
    assert history.task_states(CHIEF) == [TaskState.STOPPED]


def test_a_task_that_cannot_be_started_is_a_failed_start() -> None:
    history = History(plan(W0))
    history.feed(HostReady("h1"), TaskUnstartable(W0, 0, "'pyhton' not found"))
    history.judged()
    history.closed()
    assert history.code is ExitCode.START


def test_the_start_has_a_deadline_that_names_what_is_late() -> None:
    history = History(plan(W0, PS))
    assert deadlines(history.actions) == {"start": 300.0}
    history.feed(HostReady("h1"), TaskStarted(W0, 0))
    history.feed(Expired("start"))
    history.judged()
    assert history.verdict is not None
    assert "ps:0" in history.verdict.cause
    assert "worker:0" not in history.verdict.cause
    assert history.verdict.run_exit_code is ExitCode.START


# --- interrupts -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "signal"),
    [
        (ExitCode.INTERRUPTED, "INT"),
        (ExitCode.TERMINATED, "TERM"),
        (ExitCode.HANGUP, "TERM"),
    ],
)
def test_one_interrupt_stops_gently(code: ExitCode, signal: str) -> None:
    history = History(plan(CHIEF, W0))
    history.up()
    actions = history.feed(Interrupted(code))
    assert stopped(actions) == [(CHIEF, signal), (W0, signal)]
    history.obey(CHIEF, W0)
    history.closed()
    assert history.code is code
    assert history.run_states[-1] is RunState.STOPPED


def test_the_first_ctrl_c_says_what_a_second_one_does() -> None:
    history = History(plan(W0))
    history.up()
    says = [a.text for a in history.feed(Interrupted(ExitCode.INTERRUPTED))[:1]]  # type: ignore[union-attr]  # the first action is a Say, or the test fails
    assert "again" in says[0]


@pytest.mark.parametrize("interrupts", [1, 2])
def test_tasks_killed_after_the_grace_are_named(interrupts: int) -> None:
    history = History(plan(W0, W1))
    history.up()
    for _ in range(interrupts):
        history.feed(Interrupted(ExitCode.INTERRUPTED))
    history.obey(W0)
    says = [a.text for a in history.obey(W1, signal="SIGKILL") if isinstance(a, Say)]
    by_grace = interrupts == 1
    assert ["killed after 10 s (grace): worker:1." in text for text in says] == (
        [True] if by_grace else []
    )


def test_a_second_interrupt_kills_servers_too() -> None:
    history = History(plan(W0, PS))
    history.up()
    history.feed(Interrupted(ExitCode.INTERRUPTED))
    actions = history.feed(Interrupted(ExitCode.INTERRUPTED))
    assert set(stopped(actions)) == {(W0, "KILL"), (PS, "KILL")}


def test_a_third_interrupt_leaves_and_names_what_may_be_left() -> None:
    history = History(plan(W0))
    history.up()
    for _ in range(3):
        actions = history.feed(Interrupted(ExitCode.INTERRUPTED))
    assert any(isinstance(a, Say) and "worker:0" in a.text for a in actions)
    assert history.code is ExitCode.INTERRUPTED
    assert history.task_states(W0)[-1] is TaskState.LOST


def test_an_interrupt_during_start_up_stops_at_once() -> None:
    history = History(plan(W0))
    assert closing(history.feed(Interrupted(ExitCode.TERMINATED)))
    history.closed()
    assert history.code is ExitCode.TERMINATED


def test_a_failure_that_came_just_before_the_interrupt_stays_the_verdict() -> None:
    history = History(plan(CHIEF, W0))
    history.up()
    history.exits(W0, 1)
    history.feed(Interrupted(ExitCode.INTERRUPTED))
    history.obey(CHIEF)
    history.closed()
    assert history.code == ExitCode.TASK_FAILED


# --- the rest -------------------------------------------------------------------------


def test_a_stalled_run_ends_with_code_6() -> None:
    history = History(plan(CHIEF, W0))
    history.up()
    history.feed(Stalled("no step for 60 s: chief:0 waits for worker:0"))
    history.judged()
    history.obey(CHIEF, W0)
    history.closed()
    assert history.code is ExitCode.NO_PROGRESS


def test_a_fault_of_the_launcher_ends_with_code_8() -> None:
    history = History(plan(W0))
    history.up()
    history.feed(LauncherFault("out of memory"))
    history.judged()
    history.obey(W0)
    history.closed()
    assert history.code is ExitCode.RESOURCES


def test_tasks_that_survive_kill_are_given_up() -> None:
    history = History(plan(W0))
    history.up()
    history.feed(Interrupted(ExitCode.TERMINATED))
    assert closing(history.feed(Expired("stop")))
    assert history.task_states(W0)[-1] is TaskState.LOST
    history.closed()
    assert history.code is ExitCode.CONTACT_LOST


def test_an_agent_that_does_not_leave_is_dropped() -> None:
    history = History(plan(W0))
    history.up()
    history.exits(W0)
    actions = history.feed(Expired("close"))
    assert DropHosts(("h1",)) in actions
    assert history.code is ExitCode.CONTACT_LOST


def test_random_histories_end_once_and_never_go_backwards() -> None:
    """In any order of events, states only advance, and Finish is the last action."""
    for seed in range(400):
        rng = random.Random(seed)
        tasks = (CHIEF, W0, W1, PS, EVALUATOR)
        restarts = rng.choice([0, 0, 1, 3])
        history = History(
            plan(
                *tasks,
                hosts=("h1", "h2"),
                max_restarts=restarts,
                restart_alone=rng.random() < 0.5,
            )
        )
        for _ in range(60):
            history.feed(_random_event(rng, history, tasks))
        _settle(history)
        assert history.finish is not None, f"seed {seed}"
        for task in tasks:
            _assert_forward(history, task, seed)
            assert history.state.tasks[task].state.final, f"seed {seed}"


def _random_event(
    rng: random.Random, history: History, tasks: tuple[TaskId, ...]
) -> Event:
    task = rng.choice(tasks)
    attempt = history.state.tasks[task].attempt
    host = rng.choice(["h1", "h2"])
    code = rng.choice([0, 0, 0, 1, None])
    events: list[Event] = [
        HostReady("h1"),
        HostReady("h2"),
        TaskStarted(task, attempt),
        TaskStarted(task, attempt),
        TaskListening(PS, attempt),
        TaskExited(
            task=task,
            attempt=attempt,
            code=code,
            signal=None if code is not None else "SIGKILL",
            stopped=rng.random() < 0.3,
        ),
        Expired(rng.choice(["verdict", "verdict", "evaluator", "stop"])),
    ]
    if rng.random() < 0.05:
        events += [
            HostLost(host, "gone"),
            HostFailed(host, "no"),
            Interrupted(ExitCode.INTERRUPTED),
            TaskUnstartable(task, attempt, "no"),
            Stalled("no step"),
        ]
    return rng.choice(events)


def test_an_agent_that_was_signalled_ends_the_run_as_stopped() -> None:
    history = History(plan(CHIEF, W0, hosts=("h1", "h2")))
    history.up()
    actions = history.feed(HostClosed("h1"))
    assert [sign for _, sign in stopped(actions)] == ["TERM", "TERM"]
    # The scheduler signals agents and launcher alike, so this is the same request.
    assert stopped(history.feed(Interrupted(ExitCode.TERMINATED))) == []
    # Only the next signal is a new request.
    actions = history.feed(Interrupted(ExitCode.TERMINATED))
    assert {sign for _, sign in stopped(actions)} == {"KILL"}
    history.obey(CHIEF, W0)
    history.feed(HostClosed("h2"))
    assert history.code == ExitCode.TERMINATED


def _settle(history: History) -> None:
    """End all tasks and agents, until the run is over."""
    history.feed(Interrupted(ExitCode.TERMINATED))
    for _ in range(4):
        for task, status in history.state.tasks.items():
            if status.state is not TaskState.PENDING and not status.state.final:
                history.obey(task)
        history.feed(Expired("evaluator"))
    for host, state in history.state.hosts.items():
        if state is not HostState.GONE:
            history.feed(HostClosed(host))


def _assert_forward(history: History, task: TaskId, seed: int) -> None:
    order = -1
    for state in history.task_states(task):
        if state is TaskState.STARTING:
            order = -1  # a new attempt
        assert state.order > order, f"seed {seed}: {history.task_states(task)}"
        order = state.order


def test_after_the_end_nothing_happens() -> None:
    state, _ = begin(plan(W0))
    for event in (
        HostReady("h1"),
        TaskStarted(W0, 0),
        TaskExited(task=W0, attempt=0, code=0),
        HostClosed("h1"),
    ):
        state, _ = step(state, event)
    assert state.phase is Phase.OVER
    assert step(state, Interrupted(ExitCode.INTERRUPTED)) == (state, [])
