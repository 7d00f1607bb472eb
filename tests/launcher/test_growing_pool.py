"""Tests of the pool for work that may block."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from tfcluster.launcher import growing_pool
from tfcluster.launcher.growing_pool import GrowingPool

SOON_S = 20.0


@pytest.fixture
def may_end() -> Iterator[threading.Event]:
    """What blocked work waits for."""
    event = threading.Event()
    yield event
    event.set()


def mine(before: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before]


def test_a_burst_of_work_needs_one_thread(
    monkeypatch: pytest.MonkeyPatch, may_end: threading.Event
) -> None:
    monkeypatch.setattr(growing_pool, "PATIENCE_S", 2 * SOON_S)
    before = set(threading.enumerate())
    pool, names = GrowingPool(), SimpleQueue[str]()

    def act() -> None:
        may_end.wait(SOON_S)
        names.put(threading.current_thread().name)

    for number in range(256):
        pool.run(f"write h{number}", act)
    assert len(mine(before)) <= 2
    may_end.set()
    assert [names.get(timeout=SOON_S) for _ in range(256)] == [
        f"write h{number}" for number in range(256)
    ]
    assert len(mine(before)) == 2


def test_blocked_threads_keep_no_work_waiting(may_end: threading.Event) -> None:
    pool, done = GrowingPool(), threading.Event()

    def block() -> None:
        may_end.wait(2 * SOON_S)

    for number in range(3 * growing_pool.GROWTH):
        pool.run(f"stuck {number}", block)
    pool.run("free", done.set)
    assert done.wait(SOON_S)
    assert not may_end.is_set()


def test_work_that_arrives_all_the_time_hides_no_blocked_thread(
    may_end: threading.Event,
) -> None:
    pool, done = GrowingPool(), threading.Event()

    def block() -> None:
        may_end.wait(2 * SOON_S)

    pool.run("stuck", block)
    while not done.wait(growing_pool.PATIENCE_S / 10):
        pool.run("free", done.set)
    assert not may_end.is_set()


def test_work_that_fails_costs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    failures, done = SimpleQueue[str](), threading.Event()

    def note(failure: threading.ExceptHookArgs) -> None:
        failures.put(failure.exc_type.__name__)

    monkeypatch.setattr(threading, "excepthook", note)
    pool = GrowingPool()

    def fail() -> None:
        raise KeyError("defect")

    for _ in range(3):
        pool.run("fails", fail)
        assert failures.get(timeout=SOON_S) == "KeyError"
    pool.run("free", done.set)
    assert done.wait(SOON_S)


def test_no_work_is_lost_while_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_pool, "IDLE_S", 0.001)
    pool = GrowingPool()
    for pause_s in [0.0005, 0.001, 0.0015] * 50:
        done = threading.Event()
        pool.run("work", done.set)
        assert done.wait(SOON_S)
        threading.Event().wait(pause_s)
