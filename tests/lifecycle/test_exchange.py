"""Tests of tasks that exit with 0 without an exchange, and of the run's exit code."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.lifecycle.histories import CHIEF, W0, W1, History, plan, started
from tfcluster.base.states import TaskState
from tfcluster.base.task_id import TaskId
from tfcluster.lifecycle.events import TaskExited, TaskSettled
from tfcluster.lifecycle.shutdown import run_code
from tfcluster.lifecycle.state import Plan
from tfcluster.lifecycle.step import NOTHING_EXCHANGED


def together(*tasks: TaskId, max_restarts: int = 0) -> Plan:
    """Return a plan whose tasks must exchange something."""
    found = plan(*tasks, max_restarts=max_restarts)
    return replace(found, must_exchange=frozenset(tasks))


def ended(
    history: History, task: TaskId, code: int = 0, *, exchanged: bool = False
) -> None:
    attempt = history.state.tasks[task].attempt
    cause = None if code == 0 else f"cause of {task}"
    history.feed(
        TaskExited(
            task=task, attempt=attempt, code=code, exchanged=exchanged, cause=cause
        ),
        TaskSettled(task, attempt),
    )


def finished(history: History, *stopped: TaskId) -> int | None:
    history.judged()
    history.obey(*stopped)
    history.closed()
    return history.code


def test_tasks_that_have_exchanged_succeed() -> None:
    history = History(together(CHIEF, W0))
    history.up()
    ended(history, CHIEF, exchanged=True)
    ended(history, W0, exchanged=True)
    assert finished(history) == 0


def test_an_end_without_exchange_is_a_failure_that_says_what_to_do() -> None:
    history = History(together(CHIEF, W0))
    history.up()
    ended(history, CHIEF, exchanged=True)
    ended(history, W0)
    assert history.state.tasks[W0].state is TaskState.FAILED
    assert finished(history) == 1
    verdict = history.verdict
    assert verdict is not None
    assert (verdict.task, verdict.exit_code) == (W0, 0)
    assert verdict.cause == NOTHING_EXCHANGED
    assert "strategy: none" in verdict.cause
    assert "require_exchange: false" in verdict.cause


def test_who_was_told_to_stop_has_nothing_to_prove() -> None:
    history = History(together(CHIEF, W0))
    history.up()
    ended(history, W0, 5)
    history.judged()
    history.obey(CHIEF)
    assert history.state.tasks[CHIEF].state is TaskState.STOPPED


def test_it_is_not_started_again_in_vain() -> None:
    history = History(together(CHIEF, W0, max_restarts=3))
    history.up()
    ended(history, W0)
    assert started(history.judged()) == []
    assert history.verdict is not None


def test_what_an_earlier_attempt_has_exchanged_counts() -> None:
    history = History(together(CHIEF, W0, max_restarts=1))
    history.up()
    ended(history, W0, 7, exchanged=True)
    history.judged()
    attempt = history.state.tasks[CHIEF].attempt
    history.feed(
        TaskExited(
            task=CHIEF,
            attempt=attempt,
            code=None,
            signal="SIGTERM",
            stopped=True,
            exchanged=True,
        ),
        TaskSettled(CHIEF, attempt),
    )
    history.up()
    ended(history, CHIEF)
    ended(history, W0)
    assert finished(history) == 0


def test_a_code_of_an_attempt_that_was_got_over_is_forgotten() -> None:
    history = History(plan(W0, max_restarts=1))
    history.up()
    ended(history, W0, 7)
    history.judged()
    history.up()
    ended(history, W0, 9)
    assert finished(history) == 9


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ({33}, 33),
        ({1}, 1),
        ({125}, 125),
        ({33, 35}, 1),
        ({33, None}, 1),
        ({0}, 1),
        ({None}, 1),
        # These codes have a meaning to tfcluster, schedulers or shells.
        ({2}, 1),
        ({3}, 1),
        ({8}, 1),
        ({75}, 1),
        ({99}, 1),
        ({100}, 1),
        ({124}, 1),
        ({127}, 1),
        ({137}, 1),
        ({255}, 1),
    ],
)
def test_a_code_of_all_tasks_is_passed_on(
    codes: set[int | None], expected: int
) -> None:
    assert run_code(codes) == expected


def test_a_victims_code_does_not_count() -> None:
    history = History(plan(W0, W1))
    history.up()
    ended(history, W0, 33)
    history.feed(TaskExited(task=W1, attempt=0, code=1, cause="lost", victim=True))
    assert finished(history) == 33
