"""Tests of data tasks that fail: training goes on, except without the dispatcher."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.lifecycle import histories
from tests.lifecycle.histories import W0, W1, History, started, stopped
from tfcluster.base.errors import ExitCode
from tfcluster.base.task_id import TaskId
from tfcluster.lifecycle.actions import Say
from tfcluster.lifecycle.state import Plan, Role

DATA0, DATA1 = TaskId("data", 0), TaskId("data", 1)


def with_data(*, max_restarts: int = 0, data: tuple[TaskId, ...]) -> History:
    training = histories.plan(W0, W1, max_restarts=max_restarts)
    plan: Plan = replace(
        training,
        tasks={**training.tasks, **dict.fromkeys(data, "h1")},
        roles={**training.roles, **dict.fromkeys(data, Role.SERVER)},
        apart=frozenset(data),
        spare=frozenset(data) - {DATA0},
    )
    history = History(plan)
    history.up()
    return history


@pytest.mark.parametrize("lost", [DATA0, DATA1])
def test_one_starts_again_while_the_training_goes_on(lost: TaskId) -> None:
    history = with_data(max_restarts=1, data=(DATA0, DATA1))
    history.exits(lost, None, signal="SIGKILL")
    actions = history.judged()
    assert started(actions) == [lost]
    assert stopped(actions) == []
    assert history.state.tasks[W0].attempt == 0


def test_a_training_task_takes_all_with_it_nevertheless() -> None:
    history = with_data(max_restarts=1, data=(DATA0, DATA1))
    history.exits(W0, 1)
    assert {task for task, _ in stopped(history.judged())} == {W1, DATA0, DATA1}


def test_without_restarts_the_others_do_its_work() -> None:
    history = with_data(data=(DATA0, DATA1))
    history.exits(DATA1, None, signal="SIGKILL")
    (said,) = [action for action in history.judged() if isinstance(action, Say)]
    assert said.text.startswith("warning: data:1 failed (cause of data:1)")
    assert history.verdict is None
    history.exits(W0)
    history.exits(W1)
    history.obey(DATA0)
    history.closed()
    assert history.code is ExitCode.OK


def test_without_the_dispatcher_nobody_gets_data() -> None:
    history = with_data(data=(DATA0, DATA1))
    history.exits(DATA0, None, signal="SIGKILL")
    history.judged()
    assert history.verdict is not None
    assert history.verdict.task == DATA0
