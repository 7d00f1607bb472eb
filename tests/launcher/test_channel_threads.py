"""Tests of the threads that serve the channels of all hosts, and of their pool."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from tests.protocol.kinds import example
from tfcluster import __version__
from tfcluster.launcher import channel_threads
from tfcluster.launcher.agent_connection import (
    AgentConnection,
    Closed,
    Received,
    Reception,
)
from tfcluster.launcher.channel_threads import ChannelThreads, GrowingPool, Watch
from tfcluster.protocol import messages, requests, wire
from tfcluster.protocol.frames import encode
from tfcluster.protocol.wire import PROTOCOL, WireError, parse
from tfcluster.schedulers.starting import is_readable

SOON_S = 20.0
NONCE = "n0nce"


def hello(**keys: object) -> bytes:
    said = parse(encode(example(messages.Hello)))
    known = {"nonce": NONCE, "version": __version__, "protocol": PROTOCOL}
    return wire.encode({**said, **known, **keys})


HELLO = hello()
HELD = encode(messages.Held((), None))
PING = requests.PingRequest()


class Pipes:
    """A channel whose other side is this test."""

    def __init__(self) -> None:
        self._read, self.said = os.pipe()
        self.heard: SimpleQueue[bytes] = SimpleQueue()
        self.may_write = threading.Event()
        self.may_write.set()
        self.killed = threading.Event()

    def fileno(self) -> int:
        return self._read

    def read(self) -> bytes:
        return os.read(self._read, 1 << 16)

    def has_unread(self) -> bool:
        return is_readable(self._read)

    def write(self, data: bytes) -> None:
        self.may_write.wait(SOON_S)
        self.heard.put(data)

    def close(self) -> None:
        self.heard.put(b"")

    def kill(self) -> None:
        self.killed.set()

    def diagnosis(self) -> str:
        os.close(self._read)
        return "exit status 3"


def listening(
    host: str,
    pipes: Pipes,
    post: Callable[[Received | Closed], None],
    threads: ChannelThreads,
) -> AgentConnection:
    """A connection that posts what arrives."""
    connection = AgentConnection(host, pipes, NONCE, post, threads)
    connection.listen()
    return connection


@contextmanager
def connected(
    threads: ChannelThreads, host: str = "h1"
) -> Iterator[tuple[Pipes, AgentConnection, SimpleQueue[Received | Closed]]]:
    pipes, inbox = Pipes(), SimpleQueue[Received | Closed]()
    yield pipes, listening(host, pipes, inbox.put, threads), inbox
    pipes.may_write.set()


def mine(before: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before]


def test_frames_arrive_then_the_end() -> None:
    with connected(ChannelThreads()) as (pipes, _, inbox):
        os.write(pipes.said, b"Welcome to h1\n" + HELLO + HELD)
        items = [inbox.get(timeout=SOON_S) for _ in range(2)]
        assert [type(i.message) for i in items if isinstance(i, Received)] == [
            messages.Hello,
            messages.Held,
        ]
        os.close(pipes.said)
        end = inbox.get(timeout=SOON_S)
    assert end == Closed("h1", "its agent ended (exit status 3)")
    assert not pipes.killed.is_set()


def test_a_channel_with_other_text_is_killed() -> None:
    with connected(ChannelThreads()) as (pipes, _, inbox):
        os.write(pipes.said, b"This account is not available.\n")
        os.close(pipes.said)
        end = inbox.get(timeout=SOON_S)
    assert isinstance(end, Closed)
    assert end.cause == (
        "no hello from the agent; it said: This account is not available. "
        "(exit status 3)"
    )
    assert pipes.killed.is_set()


def test_frames_are_written_in_order_and_then_the_input_is_closed() -> None:
    with connected(ChannelThreads()) as (pipes, contact, _):
        asked = [requests.More(number) for number in range(50)]
        for request in asked:
            contact.send(request)
        contact.close()
        contact.send(PING)
        heard = [pipes.heard.get(timeout=SOON_S) for _ in range(51)]
        os.close(pipes.said)
    assert heard == [*map(encode, asked), b""]
    assert pipes.heard.empty()


def test_what_has_arrived_counts_before_it_is_handled() -> None:
    threads, busy, may_go_on = ChannelThreads(), threading.Event(), threading.Event()

    def post(item: Received | Closed) -> None:
        busy.set()
        may_go_on.wait(SOON_S)

    one, two = Pipes(), Pipes()
    to_one = listening("h1", one, post, threads)
    to_two = listening("h2", two, lambda item: None, threads)
    assert 0.0 < to_two.silent_s() < SOON_S
    os.write(one.said, HELLO)
    assert busy.wait(SOON_S)
    # The thread that reads is occupied, so this stays in the pipe.
    os.write(two.said, HELLO)
    assert to_two.silent_s() == 0.0
    assert to_one.silent_s() > 0.0
    may_go_on.set()
    for pipes in (one, two):
        os.close(pipes.said)


def test_a_host_that_takes_nothing_keeps_no_other_waiting() -> None:
    threads = ChannelThreads()
    with (
        connected(threads) as (stuck, to_stuck, _),
        connected(threads) as (other, to_other, _),
    ):
        stuck.may_write.clear()
        to_stuck.send(PING)
        for _ in range(20):
            to_stuck.send(PING)
            to_other.send(PING)
        assert [other.heard.get(timeout=SOON_S) for _ in range(20)]
        assert stuck.heard.empty()
        for pipes in (stuck, other):
            os.close(pipes.said)


def test_a_defect_on_the_way_of_one_host_silences_no_other() -> None:
    threads, items = ChannelThreads(), SimpleQueue[Received | Closed]()

    def post(item: Received | Closed) -> None:
        if isinstance(item, Received):
            raise KeyError("defect")
        items.put(item)

    one, two = Pipes(), Pipes()
    listening("h1", one, post, threads)
    listening("h2", two, items.put, threads)
    os.write(one.said, HELLO)
    assert items.get(timeout=SOON_S) == Closed(
        "h1", "KeyError: 'defect' (exit status 3)"
    )
    os.write(two.said, HELLO)
    assert isinstance(items.get(timeout=SOON_S), Received)
    os.close(one.said)
    os.close(two.said)
    assert isinstance(items.get(timeout=SOON_S), Closed)


def test_a_hundred_hosts_need_few_threads() -> None:
    before = set(threading.enumerate())
    threads, count = ChannelThreads(), 100
    channels = [Pipes() for _ in range(count)]
    inbox = SimpleQueue[Received | Closed]()
    contacts = [
        listening(f"h{n}", pipes, inbox.put, threads)
        for n, pipes in enumerate(channels)
    ]
    for contact in contacts:
        contact.send(PING)
        channels[contacts.index(contact)].heard.get(timeout=SOON_S)
    # One reads, one hands out the work of the others.
    assert len(mine(before)) <= 10
    for pipes in channels:
        os.close(pipes.said)
    assert {inbox.get(timeout=SOON_S).host for _ in channels} == {
        f"h{n}" for n in range(count)
    }


def test_all_threads_end_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_threads, "IDLE_S", 0.01)
    before = set(threading.enumerate())
    threads = ChannelThreads()
    for _ in range(3):  # they also begin again
        with connected(threads) as (pipes, contact, inbox):
            contact.send(PING)
            pipes.heard.get(timeout=SOON_S)
            os.close(pipes.said)
            inbox.get(timeout=SOON_S)
        # A thread that ends may have begun another one.
        deadline = time.monotonic() + SOON_S
        while (left := mine(before)) and time.monotonic() < deadline:
            left[0].join(SOON_S)
        assert left == []


def test_a_descriptor_may_have_the_number_of_one_that_has_ended() -> None:
    """The first is closed at its end; the kernel gives its number to the next one."""
    threads, numbers = ChannelThreads(), set()
    for _ in range(20):
        done = threading.Event()
        ours, theirs = os.pipe()
        numbers.add(ours)

        def end(number: int = ours, done: Callable[[], None] = done.set) -> None:
            os.close(number)
            done()

        threads.watch(Watch("end", ours, lambda: False, end))
        os.close(theirs)
        assert done.wait(SOON_S)
    assert len(numbers) < 20


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_noise_then_frames_in_any_portions(size: int) -> None:
    said = b"motd\n{not json}\n" + HELLO + HELD + encode(messages.Bye(0, False))
    reception = Reception(NONCE)
    portions = [said[at : at + size] for at in range(0, len(said), size)]
    found = [type(said) for part in portions for said in reception.feed(part)]
    assert found == [messages.Hello, messages.Held, messages.Bye]
    reception.end()


def test_a_hello_with_another_nonce_is_noise() -> None:
    reception = Reception(NONCE)
    other = hello(nonce="other")
    assert list(reception.feed(other)) == []
    with pytest.raises(WireError, match="no hello from the agent; it said"):
        reception.end()


def test_an_agent_of_another_version_is_named_before_its_hello_is_read() -> None:
    other = wire.encode({"type": "hello", "nonce": NONCE, "version": "0.0.1"})
    with pytest.raises(WireError, match=r"it runs tfcluster 0\.0\.1, but this is"):
        list(Reception(NONCE).feed(other))


def test_a_frame_that_violates_the_protocol_ends_the_contact() -> None:
    with connected(ChannelThreads()) as (pipes, _, inbox):
        os.write(pipes.said, HELLO + b'{"type":"held","ports":[1]}\n')
        inbox.get(timeout=SOON_S)
        end = inbox.get(timeout=SOON_S)
        os.close(pipes.said)
    assert isinstance(end, Closed)
    assert end.cause.startswith(
        "its agent violated the protocol: 'held' frame: 'cause' is missing"
    )
    assert pipes.killed.is_set()


def test_nothing_is_posted_before_somebody_listens() -> None:
    pipes, inbox = Pipes(), SimpleQueue[Received | Closed | None]()
    connection = AgentConnection("h1", pipes, NONCE, inbox.put, ChannelThreads())
    os.write(pipes.said, HELLO)
    os.close(pipes.said)
    inbox.put(None)  # the launcher notes the connection here
    connection.listen()
    assert inbox.get(timeout=SOON_S) is None
    assert isinstance(inbox.get(timeout=SOON_S), Received)
    assert isinstance(inbox.get(timeout=SOON_S), Closed)


@pytest.fixture
def may_end() -> Iterator[threading.Event]:
    """What blocked work waits for."""
    event = threading.Event()
    yield event
    event.set()


def test_a_burst_of_work_needs_one_thread(
    monkeypatch: pytest.MonkeyPatch, may_end: threading.Event
) -> None:
    monkeypatch.setattr(channel_threads, "PATIENCE_S", 2 * SOON_S)
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

    for number in range(3 * channel_threads.GROWTH):
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
    while not done.wait(channel_threads.PATIENCE_S / 10):
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
    monkeypatch.setattr(channel_threads, "IDLE_S", 0.001)
    pool = GrowingPool()
    for pause_s in [0.0005, 0.001, 0.0015] * 50:
        done = threading.Event()
        pool.run("work", done.set)
        assert done.wait(SOON_S)
        threading.Event().wait(pause_s)
