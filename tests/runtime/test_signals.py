"""The program's handlers of signals. Other ranks exist only as their notes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType

import pytest

from tests.kit.ranks import as_threads, installed_signals, results
from tfcluster.runtime.collective import CollectiveError, Group, Signature
from tfcluster.runtime.collective.collectives import meet
from tfcluster.runtime.signals import Nearness, Signals

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@dataclass
class Others:
    """Another rank, at whose meetings ``answers`` are called in turn."""

    answers: list[Callable[[bytes], list[bytes] | None]] = field(default_factory=list)
    nearness: Nearness = Nearness.CONNECTED
    completed: int = 0
    told: list[tuple[int, int]] = field(default_factory=list)
    telling: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> None:
        pass

    def notify(self, number: int, count: int) -> None:
        self.told.append((number, count))
        self.telling.set()

    def meet(self, note: Callable[[], bytes | None]) -> list[bytes] | None:
        given = note()
        return None if given is None else self.answers.pop(0)(given)


def comes(note: bytes) -> list[bytes]:
    """The other rank is at the same point."""
    return [note, note]


def exchanges(note: bytes) -> None:
    """The other rank is in an exchange."""


def is_ahead(note: bytes) -> list[bytes]:
    """The other rank has ended one section more."""
    return [note, note[:-1] + bytes([note[-1] + 1])]


def is_gone(note: bytes) -> list[bytes]:
    raise CollectiveError("rank 1 has left")


@pytest.fixture
def signals() -> Iterator[Signals]:
    with installed_signals() as installed:
        yield installed


@pytest.fixture
def calls(signals: Signals) -> list[int]:
    """The signals for which the handlers of the program have been called."""
    found: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        found.append(number)

    for number in (TERM, USR1):
        signal.signal(number, handler)
    return found


def test_the_program_sees_its_own_handlers(signals: Signals) -> None:
    def first(*_: object) -> None: ...

    def second(*_: object) -> None: ...

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.signal(TERM, first) is signal.SIG_DFL
    assert signal.getsignal(TERM) is first
    assert signal.signal(TERM, second) is first
    assert signal.signal(TERM, signal.SIG_IGN) is second
    assert signal.getsignal(TERM) is signal.SIG_IGN
    assert signal.signal(signal.SIGWINCH, first) is signal.SIG_DFL
    assert signal.signal(signal.SIGWINCH, signal.SIG_DFL) is first


def test_without_other_ranks_a_handler_runs_at_once(calls: list[int]) -> None:
    signal.raise_signal(TERM)
    assert calls == [TERM]


@pytest.mark.parametrize("nearness", [Nearness.ALONE, Nearness.CONNECTED])
def test_no_handler_runs_in_a_section(
    signals: Signals, calls: list[int], nearness: Nearness
) -> None:
    signals.coordinate(Others([comes], nearness))
    with signals:
        with signals:
            signal.raise_signal(TERM)
        assert calls == []
    assert calls == [TERM]


def test_ranks_meet_after_the_exchange_that_one_is_in(
    signals: Signals, calls: list[int]
) -> None:
    signals.coordinate(Others([exchanges, comes]))
    signal.raise_signal(TERM)
    with signals:
        pass
    assert calls == []
    with signals:
        pass
    assert calls == [TERM]


def test_a_rank_goes_on_to_where_the_other_one_waits(
    signals: Signals, calls: list[int]
) -> None:
    signals.coordinate(Others([is_ahead, comes]))
    with signals:
        signal.raise_signal(TERM)
    assert calls == []
    with signals:
        pass
    assert calls == [TERM]


def test_a_rank_waits_where_the_other_one_comes_to(
    signals: Signals, calls: list[int]
) -> None:
    def is_behind(note: bytes) -> list[bytes]:
        return [note, note[:-1] + bytes([note[-1] - 1])]

    signals.coordinate(Others([is_behind, comes]))
    with signals:
        signal.raise_signal(TERM)
    assert calls == [TERM]


def test_a_program_busy_with_something_else_is_interrupted(
    signals: Signals, calls: list[int]
) -> None:
    signals.coordinate(Others([comes]))
    signal.raise_signal(TERM)
    ours = threading.Event()
    while not calls:
        assert not ours.wait(0.01)
    assert calls == [TERM]


@pytest.mark.parametrize("nearness", [Nearness.ALONE, Nearness.CONNECTED])
def test_no_handler_runs_while_a_function_is_traced(
    signals: Signals, calls: list[int], nearness: Nearness
) -> None:
    asked: list[list[int]] = []

    def is_tracing() -> bool:
        asked.append(list(calls))
        return len(asked) < 2

    signals.is_tracing = is_tracing
    signals.coordinate(Others([comes], nearness))
    signal.raise_signal(TERM)
    ours = threading.Event()
    while not calls:
        assert not ours.wait(0.01)
    assert asked == [[], []]


def test_another_ranks_signal_is_handled_once(
    signals: Signals, calls: list[int]
) -> None:
    others = Others([comes, comes])
    signals.coordinate(others)
    signals.heard(TERM, 0)
    with signals:
        pass
    assert calls == [TERM]
    signals.heard(TERM, 0)  # The same one, which comes late.
    signal.raise_signal(TERM)  # As sent to all ranks.
    with signals:
        pass
    assert calls == [TERM]
    signals.heard(TERM, 1)
    with signals:
        pass
    assert calls == [TERM, TERM]


def test_a_signal_that_all_have_got_is_not_expected_again(
    signals: Signals, calls: list[int]
) -> None:
    signals.coordinate(Others([comes, comes]))
    with signals:
        signals.heard_in([b"\0\2\0\0\0\0\0\0"])
        signal.raise_signal(TERM)
    assert calls == [TERM]
    with signals:
        signal.raise_signal(TERM)
    assert calls == [TERM, TERM]


def test_a_signal_that_comes_during_a_meeting_is_for_the_next_one(
    signals: Signals, calls: list[int]
) -> None:
    def comes_late(note: bytes) -> list[bytes]:
        signal.raise_signal(USR1)
        return [note, note]

    signals.coordinate(Others([comes_late, exchanges, comes]))
    with signals:
        signal.raise_signal(TERM)
    assert calls == [TERM]
    with signals:
        pass
    assert calls == [TERM, USR1]


def test_a_rank_that_waits_elsewhere_lets_the_others_go_on(
    signals: Signals, calls: list[int]
) -> None:
    met = threading.Event()

    def is_between(note: bytes) -> list[bytes]:
        met.set()
        return [note, bytes([*note[:2], 0, *note[3:]])]

    signals.coordinate(Others([is_between] * 1000))
    with signals.elsewhere():
        signals.heard(TERM, 0)
        assert met.wait(10)
        assert calls == []


def test_a_rank_goes_on_to_where_another_one_waits_elsewhere(
    signals: Signals, calls: list[int]
) -> None:
    def waits_elsewhere(note: bytes) -> list[bytes]:
        return [note, bytes([*note[:2], 2, *note[3:]])]

    signals.coordinate(Others([waits_elsewhere, comes]))
    with signals:
        signal.raise_signal(TERM)
    assert calls == []
    with signals.elsewhere():
        assert calls == []
    assert calls == [TERM]


def test_others_are_told_of_what_came_here(signals: Signals, calls: list[int]) -> None:
    others = Others([comes])
    signals.coordinate(others)
    with signals:
        signal.raise_signal(USR1)
        assert others.telling.wait(10)
    assert others.told == [(USR1, 0)]
    assert calls == [USR1]


def test_the_last_rank_handles_its_signals_alone(
    signals: Signals, calls: list[int]
) -> None:
    signals.coordinate(Others([is_gone]))
    with signals:
        signal.raise_signal(TERM)
    assert calls == [TERM]


def test_an_exception_is_not_replaced(signals: Signals, calls: list[int]) -> None:
    signals.coordinate(Others([comes]))

    def fail() -> None:
        with signals:
            signal.raise_signal(TERM)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert calls == []
    with signals:
        pass
    assert calls == [TERM]


def test_a_handler_may_raise_an_exception(signals: Signals) -> None:
    signals.coordinate(Others([comes]))
    with pytest.raises(KeyboardInterrupt), signals:
        signal.raise_signal(signal.SIGINT)


def test_a_signal_that_ends_the_process_waits_for_the_file(signals: Signals) -> None:
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        with signals.held():
            os.kill(os.getpid(), TERM)
            os.write(writes, b"whole")
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads, "rb") as file:
        assert file.read() == b"whole"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -TERM


# --- groups ---------------------------------------------------------------------------


def test_a_group_meets_between_two_exchanges() -> None:
    def act(group: Group) -> list[bytes] | None:
        meet(group, Signature("first"))
        found = group.meet(lambda: b"rank   %d" % group.rank)
        meet(group, Signature("second"))
        assert group.completed == 2
        return found

    notes = [b"rank   %d" % rank for rank in range(3)]
    assert results(as_threads(3, act)) == [notes] * 3


def test_an_exchange_goes_on_after_it_has_heard_of_a_meeting() -> None:
    def act(group: Group) -> list[bytes] | None:
        heard: list[bytes] = []
        group.met = heard.extend
        found = group.meet(lambda: b"a signal") if group.rank else None
        meet(group, Signature("first"))
        assert found is None
        return heard

    others = [b"a signal", b"a signal"]
    assert results(as_threads(3, act)) == [others, [], []]
