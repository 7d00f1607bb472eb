"""Histories of fetching results between the end of the tasks and that of the agents."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.lifecycle.histories import W0, W1, History, plan
from tfcluster.base.errors import ExitCode
from tfcluster.lifecycle.actions import CloseHosts, FetchResults, LeaveResults
from tfcluster.lifecycle.events import HostFailed, HostLost, Interrupted, ResultsFetched
from tfcluster.lifecycle.state import Plan


def planned(
    *, results: bool = True, hurried: bool = False, requeues: bool = False
) -> Plan:
    made = plan(W0, W1, hosts=("h1", "h2"))
    return replace(made, results=results, hurried=hurried, requeues=requeues)


def fetches(history: History) -> list[FetchResults]:
    return [each for each in history.actions if isinstance(each, FetchResults)]


def closes(history: History) -> bool:
    return any(isinstance(each, CloseHosts) for each in history.actions)


def test_agents_are_closed_when_all_has_been_fetched() -> None:
    history = History(planned())
    history.up()
    history.exits(W0)
    assert not fetches(history)
    history.exits(W1)
    assert fetches(history) == [FetchResults(("h1", "h2"))]
    assert not closes(history)
    history.feed(ResultsFetched())
    assert closes(history)
    history.closed()
    assert history.code == ExitCode.OK


def test_without_results_nothing_is_fetched() -> None:
    history = History(planned(results=False))
    history.up()
    history.exits(W0)
    history.exits(W1)
    assert closes(history)
    assert not fetches(history)


def test_results_of_a_failed_run_are_fetched() -> None:
    history = History(planned())
    history.up()
    history.exits(W0, 33)
    history.judged()
    history.obey(W1)
    assert fetches(history) == [FetchResults(("h1", "h2"))]
    history.feed(ResultsFetched())
    history.closed()
    assert history.code == 33


def test_a_host_that_is_lost_meanwhile_does_not_hold_up_the_end() -> None:
    history = History(planned())
    history.up()
    history.exits(W0)
    history.exits(W1)
    history.feed(HostLost("h1", "contact lost"), ResultsFetched())
    history.closed()
    assert history.finish is not None


def test_a_run_whose_hosts_are_all_lost_ends() -> None:
    history = History(planned())
    history.up()
    history.feed(HostLost("h1", "contact lost"), HostLost("h2", "contact lost"))
    history.judged()
    assert fetches(history) == [FetchResults(())]
    history.feed(ResultsFetched())
    assert history.code == ExitCode.CONTACT_LOST


def test_an_interrupt_ends_the_fetch_and_keeps_the_outcome() -> None:
    history = History(planned())
    history.up()
    history.exits(W0)
    history.exits(W1)
    actions = history.feed(Interrupted(ExitCode.INTERRUPTED))
    assert any(isinstance(each, LeaveResults) for each in actions)
    assert not closes(history)
    history.feed(ResultsFetched())
    history.closed()
    assert history.code == ExitCode.OK


def test_a_run_that_is_killed_fetches_nothing() -> None:
    history = History(planned())
    history.up()
    history.feed(Interrupted(ExitCode.TERMINATED), Interrupted(ExitCode.TERMINATED))
    history.obey(W0, W1)
    assert [bool(each.not_now) for each in fetches(history)] == [True]
    assert closes(history)


@pytest.mark.parametrize(
    ("code", "skipped"),
    [(ExitCode.TERMINATED, True), (ExitCode.INTERRUPTED, False)],
)
def test_a_scheduler_leaves_no_time(code: ExitCode, skipped: bool) -> None:
    history = History(planned(hurried=True))
    history.up()
    history.feed(Interrupted(code))
    history.obey(W0, W1)
    assert [bool(each.not_now) for each in fetches(history)] == [skipped]
    assert closes(history) is skipped


def test_a_run_that_never_started_has_no_results() -> None:
    history = History(planned())
    history.feed(HostFailed("h1", "no python"))
    history.judged()
    assert not fetches(history)


@pytest.mark.parametrize("requeues", [False, True])
def test_results_come_back_before_a_job_is_requeued(requeues: bool) -> None:
    """What is not here at the time limit itself stays on the hosts."""
    history = History(planned(hurried=True, requeues=requeues))
    history.up()
    history.feed(Interrupted(ExitCode.TIME_LIMIT))
    history.obey(W0, W1)
    (fetch,) = fetches(history)
    assert (fetch.not_now is None) == requeues
    if requeues:
        actions = history.feed(Interrupted(ExitCode.TERMINATED))
        assert any(isinstance(each, LeaveResults) for each in actions)
        history.feed(ResultsFetched())
    history.closed()
    assert history.code == ExitCode.TIME_LIMIT
