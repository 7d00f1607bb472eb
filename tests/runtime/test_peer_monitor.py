"""Ranks that differ, are late, or die: all others soon learn which rank it was."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.kit.ranks import TOKEN, held_addresses, in_threads
from tests.kit.time_limits import allow_s
from tests.runtime.looping import LONG_S, processes
from tfcluster.runtime.collective import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Group,
    PeerLostError,
    ReduceOp,
    Signature,
)
from tfcluster.runtime.collective.collectives import meet, reduce_arrays
from tfcluster.runtime.collective.peer_monitor import PeerMonitor
from tfcluster.runtime.collective.peer_reports import ExitReport
from tfcluster.runtime.collective.transports.hierarchical import HostTransport
from tfcluster.runtime.net.rendezvous import Member

T = TypeVar("T")


class Said:
    """The lines that ranks have written to their logs."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        self._more = threading.Condition()

    def by(self, rank: int) -> Callable[[str], None]:
        def say(text: str) -> None:
            with self._more:
                self.lines.append((rank, text))
                self._more.notify_all()

        return say

    def wait_for(self, rank: int, pattern: str) -> str:
        def found() -> str | None:
            texts = (text for who, text in self.lines if who == rank)
            return next((text for text in texts if re.search(pattern, text)), None)

        with self._more:
            text = self._more.wait_for(found, LONG_S)
        assert text, f"no {pattern!r} of rank {rank} in {self.lines}"
        return text


@contextmanager
def joined_group(
    rank: int,
    addresses: list[str],
    said: Said,
    *,
    warning_s: float | None = 0.2,
    timeout_s: float = LONG_S,
) -> Iterator[Group]:
    member = Member(rank, len(addresses), TOKEN)
    group = Group(
        HostTransport(member, addresses, timeout_s=timeout_s),
        monitor=PeerMonitor(
            member,
            addresses,
            join_timeout_s=timeout_s,
            warning_s=warning_s,
            say=said.by(rank),
        ),
    )
    try:
        yield group
    finally:
        group.close()


def with_groups(
    size: int,
    act: Callable[[Group], T],
    said: Said | None = None,
    *,
    warning_s: float | None = 0.2,
    timeout_s: float = LONG_S,
) -> list[T | BaseException]:
    said = said or Said()

    def run(rank: int) -> T:
        with joined_group(
            rank, addresses, said, warning_s=warning_s, timeout_s=timeout_s
        ) as group:
            return act(group)

    with held_addresses(size) as addresses:
        return in_threads([partial(run, rank) for rank in range(size)])


# --- ranks that are late --------------------------------------------------------------


SLOW_2, SLOW_3, SLOW_4 = (pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 4))
MORE_SIZES = pytest.mark.parametrize("size", [SLOW_2, 3, SLOW_4])


@MORE_SIZES
def test_a_rank_that_does_not_come_is_named_once_and_shows_its_stacks(
    size: int,
) -> None:
    said, last = Said(), size - 1

    def act(group: Group) -> None:
        meet(group, Signature("variables"))
        if group.rank == last:
            busy_elsewhere(said)
        meet(group, Signature("gradients of adam"))

    assert with_groups(size, act, said) == [None] * size
    text = said.wait_for(0, "has not entered")
    assert re.fullmatch(
        rf"rank {last} has not entered exchange 2: gradients of adam "
        r"\(waiting for 0 s\); its last exchange was 1: variables, 0 s ago",
        text,
    )
    shown = said.wait_for(last, "It is here")
    assert "busy_elsewhere" in shown
    assert "for this rank to enter exchange 2: gradients of adam" in shown
    # Connecting may also take longer than the warning delay, which any rank reports.
    late = f"rank {last} has not entered"
    assert {rank for rank, line in said.lines if line.startswith(late)} == {0}
    assert len([1 for _, line in said.lines if "It is here" in line]) == 1


def busy_elsewhere(said: Said) -> None:
    """Wait until rank 0 has complained, and this rank has shown its stack."""
    said.wait_for(0, "has not entered")
    ours = threading.Event()
    while not any("It is here" in line for _, line in said.lines):
        assert not ours.wait(0.01)


def test_only_exchanges_that_took_so_long_are_named() -> None:
    """Without load, so none of the 200."""
    said, warning_s = Said(), 0.2
    took_s: dict[tuple[int, int], float] = {}

    def act(group: Group) -> None:
        for number in range(1, 201):
            began = time.monotonic()
            meet(group, Signature("step"))
            took_s[group.rank, number] = time.monotonic() - began

    assert with_groups(3, act, said, warning_s=warning_s) == [None] * 3
    named = [
        (rank, int(match[1]))
        for rank, line in said.lines
        if (match := re.search(r"has not entered exchange (\d+)", line))
    ]
    assert [key for key in named if took_s[key] < warning_s] == []
    if not named:
        assert said.lines == []


def test_nobody_is_named_where_the_warning_is_off() -> None:
    said, over = Said(), threading.Event()

    def act(group: Group) -> None:
        if group.rank == 1:
            over.wait(1.0)
        meet(group, Signature("step"))

    assert with_groups(2, act, said, warning_s=None) == [None] * 2
    assert said.lines == []


def test_all_who_wait_time_out() -> None:
    over = threading.Event()
    finished = threading.Semaphore(0)

    def watch() -> None:
        for _ in range(2):
            assert finished.acquire(timeout=LONG_S)
        over.set()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    outcomes = with_groups(3, partial(_lonely, finished, over), timeout_s=0.5)
    watcher.join(LONG_S)
    for outcome in outcomes[:2]:
        assert isinstance(outcome, CollectiveTimeoutError)
        assert "rank 2 has sent nothing for 0.5 s" in str(outcome)
        assert "(in exchange 2: second)" in str(outcome)


def _lonely(finished: threading.Semaphore, over: threading.Event, group: Group) -> None:
    meet(group, Signature("first"))
    if group.rank == 2:
        over.wait(LONG_S)
        return
    try:
        meet(group, Signature("second"))
    finally:
        finished.release()


def test_a_rank_that_never_connects_is_named() -> None:
    said = Said()
    with (
        held_addresses(2) as addresses,
        joined_group(0, addresses, said, warning_s=0.1, timeout_s=0.5) as group,
        pytest.raises(CollectiveTimeoutError, match=r"rank 1"),
    ):
        meet(group, Signature("first"))
    said.wait_for(0, "^rank 1 has not connected for 0 s; what could be the cause: ")


# --- ranks that leave -----------------------------------------------------------------


@MORE_SIZES
def test_one_exchange_more_than_the_others(size: int) -> None:
    def act(group: Group) -> None:
        meet(group, Signature("step"))
        if group.rank == 1:
            meet(group, Signature("one more"))

    outcomes = with_groups(size, act)
    lonely = outcomes.pop(1)
    assert outcomes == [None] * (size - 1)
    assert isinstance(lonely, PeerLostError)
    assert "has left after exchange 1: its program has ended" in str(lonely)
    assert "(in exchange 2: one more)" in str(lonely)


@MORE_SIZES
def test_why_a_program_has_ended_is_passed_on(size: int) -> None:
    def act(group: Group) -> None:
        meet(group, Signature("step"))
        if group.rank == size - 1:
            group.close("ValueError: boom")
        else:
            reduce_arrays(group, [np.ones(200_000)], ReduceOp.SUM, Signature("more"))

    outcomes = with_groups(size, act)
    for outcome in outcomes[:-1]:
        assert isinstance(outcome, PeerLostError)
        assert (
            f"rank {size - 1} has left after exchange 1: its program has ended: "
            "ValueError: boom (in exchange 2: more)" in str(outcome)
        )


@pytest.mark.parametrize("leaves", [0, 1, 2])
def test_a_program_that_ends_before_any_exchange_is_not_waited_for(leaves: int) -> None:
    """Neither ranks that it would connect to nor ranks that connect to it wait."""

    def act(group: Group) -> None:
        if group.rank == leaves:
            vars(group)["_monitor"].join()
            group.close("ValueError: boom")
        else:
            meet(group, Signature("step"))

    outcomes = with_groups(3, act)
    assert outcomes.pop(leaves) is None
    for outcome in outcomes:
        assert isinstance(outcome, PeerLostError)
        assert str(outcome) == (
            f"rank {leaves} has left before any exchange: its program has ended: "
            "ValueError: boom (in exchange 1: step)"
        )


def test_an_exchange_that_is_interrupted_too_early_is_interrupted_again() -> None:
    class Late(HostTransport):
        """Has nothing to interrupt before the third call of ``interrupt``."""

        def __init__(self, *words: Any) -> None:
            super().__init__(*words)
            self.told = threading.Semaphore(0)

        def interrupt(self) -> None:
            self.told.release()

        def allgather(self, data: bytes) -> list[bytes]:
            for _ in range(3):
                if not self.told.acquire(timeout=LONG_S):
                    raise AssertionError("nobody told it")
            raise PeerLostError("told")

    def run(rank: int) -> None:
        member = Member(rank, 2, TOKEN)
        monitor = PeerMonitor(member, addresses, join_timeout_s=LONG_S, warning_s=None)
        group = Group(Late(member, addresses), monitor=monitor)
        if rank:
            monitor.join()
            group.close()
            return
        meet(group, Signature("step"))

    with held_addresses(2) as addresses:
        waiting, _ = in_threads([partial(run, 0), partial(run, 1)])
    assert isinstance(waiting, PeerLostError)


@pytest.mark.parametrize("size", [2, SLOW_3])
def test_what_breaks_an_exchange_off_ends_it_for_all(size: int) -> None:
    def act(group: Group) -> None:
        with group.exchange(Signature("step")):
            if group.rank == 1:
                raise MemoryError
        meet(group, Signature("next"))

    outcomes = with_groups(size, act)
    assert isinstance(outcomes[1], MemoryError)
    for rank in {*range(size)} - {1}:
        outcome = outcomes[rank]
        assert isinstance(outcome, PeerLostError)
        assert "rank 1 has left: exchange 1: step was aborted: MemoryError()" in str(
            outcome
        )


def test_a_rank_that_has_given_up_is_not_named_as_late() -> None:
    """Rank 1 has waited for rank 2, which comes when rank 1 has just left."""
    asked = threading.Event()
    why = "rank 2 has not entered exchange 1"

    def act(group: Group) -> str:
        monitor: Any = group._monitor
        meet(group, Signature("step"))
        if group.rank == 1:
            monitor.leave(ExitReport(1, "CollectiveTimeoutError", why))
        if group.rank:
            assert asked.wait(LONG_S)
            return ""
        try:
            with monitor._changed:
                assert monitor._changed.wait_for(lambda: monitor._exit_reports, LONG_S)
            return group.stall_report()
        finally:
            asked.set()

    assert with_groups(3, act)[0] == f"rank 1 has left: {why}"


# --- ranks that differ ----------------------------------------------------------------


@pytest.mark.parametrize("size", [2, SLOW_3])
@pytest.mark.parametrize("what", ["barrier", "broadcast from rank 1"])
def test_a_difference_reaches_every_rank_with_the_same_words(
    size: int, what: str
) -> None:
    def act(group: Group) -> None:
        meet(group, Signature("step"))
        meet(group, Signature("broadcast from rank 0" if group.rank else what))

    outcomes = with_groups(size, act)
    assert all(isinstance(outcome, CollectiveMismatchError) for outcome in outcomes)
    assert len({str(outcome) for outcome in outcomes}) == 1
    others = ", ".join(map(str, range(1, size)))
    assert f"rank 0: {what}; rank {others}: broadcast" in str(outcomes[0])


# --- processes ------------------------------------------------------------------------


@MORE_SIZES
@pytest.mark.parametrize("length", [10, 3_000_000])
def test_a_killed_rank_is_named_by_all_within_a_second(size: int, length: int) -> None:
    with processes(size, length) as ranks:
        ranks.wait_until_under_way()
        victim = size - 2
        ranks.ranks[victim].kill()
        killed = time.monotonic()
        for rank in {*range(size)} - {victim}:
            at, text, _ = ranks.failure(rank)
            assert at - killed < allow_s(1), text
            assert text.startswith(
                f"PeerLostError: rank {victim} has left: its process ended"
            ), text


@pytest.mark.parametrize("size", [2, SLOW_3])
def test_a_rank_that_is_killed_before_it_exchanges_is_named(size: int) -> None:
    """The others wait for its connection for exchanges, which never comes."""
    victim = size - 1
    with processes(size, 10, "waiting", str(victim)) as ranks:
        ranks.wait_until_under_way(victim)
        ranks.ranks[victim].kill()
        killed = time.monotonic()
        for rank in range(victim):
            at, text, _ = ranks.failure(rank)
            assert at - killed < allow_s(1), text
            assert text.startswith(f"PeerLostError: rank {victim} has left: its proc")
            assert text.endswith("(in exchange 1: gradients of sgd)")


def test_a_process_that_a_killed_rank_leaves_behind_hides_nothing() -> None:
    with processes(3, 10, "forking", "1") as ranks:
        ranks.wait_until_under_way()
        ranks.ranks[1].kill()
        killed = time.monotonic()
        for rank in (0, 2):
            at, text, _ = ranks.failure(rank)
            assert at - killed < allow_s(1)
            assert text.startswith("PeerLostError: rank 1 has left: its process")


@pytest.mark.parametrize(
    "length", [10, pytest.param(3_000_000, marks=pytest.mark.slow)]
)
def test_a_stopped_rank_is_named_and_then_given_up(length: int) -> None:
    with processes(3, length, stall_warning_s=0.5, stall_timeout_s=4.0) as ranks:
        ranks.wait_until_under_way()
        os.kill(ranks.ranks[1].pid, signal.SIGSTOP)
        outcomes = [ranks.failure(rank) for rank in (0, 2)]
    for _, text, _ in outcomes:
        assert text.startswith("CollectiveTimeoutError: rank 1 has sent nothing for 4")
        assert "it does not answer" in text
    assert re.search(
        r"tfcluster: rank 1 has not entered exchange \d+: gradients of sgd "
        r"\(waiting for \d s\); it does not answer "
        r"\(stopped, or stuck outside Python\?\)\n",
        outcomes[0][2],
    )
    assert outcomes[1][2] == ""
