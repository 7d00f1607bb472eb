"""Histories of a resize: hosts that are added, and a restart by a new plan."""

from __future__ import annotations

from tests.lifecycle.histories import (
    W0,
    W1,
    History,
    closing,
    plan,
    replans,
    started,
    stopped,
)
from tfcluster.base.errors import ExitCode
from tfcluster.base.task_id import TaskId
from tfcluster.lifecycle.actions import DropHosts, Failure, Say
from tfcluster.lifecycle.events import (
    HostAdded,
    HostClosed,
    HostFailed,
    HostLost,
    HostReady,
    Replanned,
    Resize,
)

W2 = TaskId("worker", 2)
RESIZE = Resize("resizing")


def two() -> History:
    history = History(plan(W0, W1, hosts=("h1", "h2")))
    history.up()
    return history


def test_all_restart_by_the_new_plan_on_more_hosts() -> None:
    history = two()
    assert started(history.feed(HostAdded("h3"), HostReady("h3"))) == []
    actions = history.feed(RESIZE)
    assert stopped(actions) == [(W0, "TERM"), (W1, "TERM")]
    assert Say("resizing") in actions
    assert replans(history.obey(W0)) == []
    assert replans(history.obey(W1)) == [frozenset({"h1", "h2", "h3"})]
    larger = plan(W0, W1, W2, hosts=("h1", "h2", "h3"))
    assert started(history.feed(Replanned(larger))) == [W0, W1, W2]
    attempts = {str(task): s.attempt for task, s in history.state.tasks.items()}
    assert attempts == {"worker:0": 1, "worker:1": 1, "worker:2": 1}
    assert (history.state.counted, history.state.restarts) == (0, 0)
    for task in (W0, W1, W2):
        history.exits(task)
    history.closed()
    assert history.code == ExitCode.OK


def test_a_task_that_was_dropped_comes_back_with_a_later_attempt() -> None:
    history = two()
    history.feed(RESIZE)
    history.obey(W0, W1)
    history.feed(Replanned(plan(W0, hosts=("h1",))))
    history.feed(RESIZE)
    history.obey(W0)
    history.feed(Replanned(plan(W0, W1, hosts=("h1", "h2"))))
    assert history.state.tasks[W1].attempt == 2


def test_an_idle_host_harms_nobody() -> None:
    for event in (
        HostFailed("h3", "no route"),
        HostLost("h3", "gone"),
        HostClosed("h3"),
    ):
        history = two()
        history.feed(HostAdded("h3"))
        actions = history.feed(event)
        assert not any(isinstance(each, Failure) for each in actions)
        assert not stopped(actions)
        if not isinstance(event, HostClosed):
            assert DropHosts(("h3",)) in actions
        history.exits(W0)
        history.exits(W1)
        history.feed(HostClosed("h1"), HostClosed("h2"))
        assert history.code == ExitCode.OK


def test_a_host_that_is_not_ready_yet_is_closed_at_the_end() -> None:
    history = two()
    history.feed(HostAdded("h3"))
    history.exits(W0)
    actions = history.exits(W1)
    assert closing(actions)
    history.feed(HostClosed("h1"), HostClosed("h2"))
    assert history.finish is None
    history.feed(HostClosed("h3"))
    assert history.code == ExitCode.OK


def test_it_is_too_late_for_a_resize_after_a_failure_or_the_end() -> None:
    history = two()
    history.exits(W0, 3)
    assert history.feed(RESIZE) == []
    history.judged()
    assert history.feed(RESIZE) == []
    ended = two()
    ended.exits(W0)
    ended.exits(W1)
    assert ended.feed(RESIZE) == []


def test_a_host_that_is_lost_meanwhile_ends_the_run_without_min() -> None:
    history = two()
    history.feed(RESIZE)
    history.feed(HostLost("h2", "gone"))
    history.obey(W0)
    history.closed()
    assert history.code == ExitCode.CONTACT_LOST


def test_with_min_the_new_plan_has_the_hosts_that_are_left() -> None:
    history = History(plan(W0, W1, hosts=("h1", "h2"), max_restarts=1, min_training=1))
    history.up()
    history.feed(HostAdded("h3"), HostReady("h3"), RESIZE)
    history.feed(HostLost("h2", "gone"))
    assert replans(history.obey(W0)) == [frozenset({"h1", "h3"})]
