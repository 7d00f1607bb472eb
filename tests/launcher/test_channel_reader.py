"""Tests of the threads that serve the channels of all hosts."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from tests.kit.waiting import eventually
from tests.protocol.kinds import example
from tfcluster import __version__
from tfcluster.launcher.agent_connection import (
    AgentConnection,
    ChannelReader,
    Closed,
    Received,
    Reception,
    Watch,
)
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
    reader: ChannelReader,
) -> AgentConnection:
    """A connection that posts what arrives."""
    connection = AgentConnection(host, pipes, NONCE, post, reader)
    connection.listen()
    return connection


@contextmanager
def connected(
    reader: ChannelReader, host: str = "h1"
) -> Iterator[tuple[Pipes, AgentConnection, SimpleQueue[Received | Closed]]]:
    pipes, inbox = Pipes(), SimpleQueue[Received | Closed]()
    yield pipes, listening(host, pipes, inbox.put, reader), inbox
    pipes.may_write.set()


def test_frames_arrive_then_the_end() -> None:
    with connected(ChannelReader()) as (pipes, _, inbox):
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
    with connected(ChannelReader()) as (pipes, _, inbox):
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
    with connected(ChannelReader()) as (pipes, contact, _):
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
    reader, busy, may_go_on = ChannelReader(), threading.Event(), threading.Event()

    def post(item: Received | Closed) -> None:
        busy.set()
        may_go_on.wait(SOON_S)

    one, two = Pipes(), Pipes()
    to_one = listening("h1", one, post, reader)
    to_two = listening("h2", two, lambda item: None, reader)
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
    reader = ChannelReader()
    with (
        connected(reader) as (stuck, to_stuck, _),
        connected(reader) as (other, to_other, _),
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
    reader, items = ChannelReader(), SimpleQueue[Received | Closed]()

    def post(item: Received | Closed) -> None:
        if isinstance(item, Received):
            raise KeyError("defect")
        items.put(item)

    one, two = Pipes(), Pipes()
    listening("h1", one, post, reader)
    listening("h2", two, items.put, reader)
    os.write(one.said, HELLO)
    assert items.get(timeout=SOON_S) == Closed(
        "h1", "KeyError: 'defect' (exit status 3)"
    )
    os.write(two.said, HELLO)
    assert isinstance(items.get(timeout=SOON_S), Received)
    os.close(one.said)
    os.close(two.said)
    assert isinstance(items.get(timeout=SOON_S), Closed)


def test_all_threads_end_by_themselves() -> None:
    before = set(threading.enumerate())
    reader = ChannelReader()
    for _ in range(3):  # they also begin again
        with connected(reader) as (pipes, contact, inbox):
            contact.send(PING)
            pipes.heard.get(timeout=SOON_S)
            os.close(pipes.said)
            inbox.get(timeout=SOON_S)
        eventually(lambda: set(threading.enumerate()) <= before, "all end", SOON_S)


def test_a_descriptor_may_have_the_number_of_one_that_has_ended() -> None:
    """The first is closed at its end; the kernel gives its number to the next one."""
    reader, numbers = ChannelReader(), set()
    for _ in range(20):
        done = threading.Event()
        ours, theirs = os.pipe()
        numbers.add(ours)

        def end(number: int = ours, done: Callable[[], None] = done.set) -> None:
            os.close(number)
            done()

        reader.watch(Watch("end", ours, lambda: False, end))
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
    with connected(ChannelReader()) as (pipes, _, inbox):
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
    connection = AgentConnection("h1", pipes, NONCE, inbox.put, ChannelReader())
    os.write(pipes.said, HELLO)
    os.close(pipes.said)
    inbox.put(None)  # the launcher notes the connection here
    connection.listen()
    assert inbox.get(timeout=SOON_S) is None
    assert isinstance(inbox.get(timeout=SOON_S), Received)
    assert isinstance(inbox.get(timeout=SOON_S), Closed)
