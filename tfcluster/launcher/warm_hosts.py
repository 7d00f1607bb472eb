"""Asks hosts to keep interpreters, to list them and to end them, all in parallel."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from tfcluster.backends.base import Starter
from tfcluster.errors import ExitCode, TfclusterError
from tfcluster.launcher.agent_connection import (
    HEARTBEAT_S,
    AgentConnection,
    Closed,
    Received,
    open_agent,
)
from tfcluster.launcher.channel_threads import ChannelThreads
from tfcluster.launcher.cleanup import FAN_OUT
from tfcluster.model import Host
from tfcluster.wire import Frame

GREETING_S = 30.0
"""How long FAN_OUT hosts may take to answer before they count as silent."""
CLOSING_S = 5.0


@dataclass(slots=True)
class Answer:
    """What one host has answered."""

    host: Host
    error: str | None = None
    code: ExitCode = ExitCode.OK
    tail: tuple[str, ...] = ()
    frames: list[Frame] = field(default_factory=list)
    """The answers to our requests."""
    package: str | None = None
    prepared: Frame | None = None
    missing: int | None = None
    """How many answers have still to come; None: nothing was asked yet."""


Ask = Callable[[Answer], Sequence[Frame]]
"""The requests for a host, once ``package`` and ``prepared`` are known."""

Post = Received | Closed | tuple[str, AgentConnection | TfclusterError]

_ANSWERS = ("kept", "unkept", "kept_list", "ended_kept")


def ask_hosts(
    hosts: Sequence[Host],
    starter: Starter,
    ask: Ask,
    *,
    patience_s: float,
    prepare: Callable[[Host], Frame] | None = None,
    unprepared: Callable[[Frame], str] = lambda frame: str(frame.get("cause")),
    say: Callable[[str], None] = lambda text: None,
) -> list[Answer]:
    """The answers of all hosts, in their order; each is asked as soon as it can be.

    ``prepare`` makes the request that prepares a host before it is asked. A host that
    is not done within ``patience_s`` after all were reached gets an error; the time
    begins again while an environment is made, of which the user is told.
    """
    asking = _Asking(hosts, starter, ask, prepare, unprepared, say)
    return asking.run(patience_s)


class _Asking:
    def __init__(
        self,
        hosts: Sequence[Host],
        starter: Starter,
        ask: Ask,
        prepare: Callable[[Host], Frame] | None,
        unprepared: Callable[[Frame], str],
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._worked_s = 0.0
        self._starter = starter
        self._ask = ask
        self._prepare = prepare
        self._unprepared = unprepared
        self._answers = {host.name: Answer(host) for host in hosts}
        self._contacts: dict[str, AgentConnection] = {}
        self._queue: SimpleQueue[Post] = SimpleQueue()
        self._run = f"warm-{secrets.token_hex(8)}"
        self._connect_slots = threading.Semaphore(FAN_OUT)
        self._gone: set[str] = set()
        self._threads = ChannelThreads()

    def run(self, patience_s: float) -> list[Answer]:
        try:
            for answer in self._answers.values():
                target = (answer.host,)
                threading.Thread(target=self._open, args=target, daemon=True).start()
            rounds = -(-len(self._answers) // FAN_OUT)
            greeting_s = GREETING_S * rounds
            self._until(lambda a: a.package is not None, greeting_s)
            self._until(lambda a: a.missing == 0, patience_s)
        finally:
            self._close()
        return list(self._answers.values())

    def _open(self, host: Host) -> None:
        try:
            with self._connect_slots:
                contact = open_agent(
                    self._starter,
                    host,
                    self._run,
                    0.0,
                    self._queue.put,
                    self._threads,
                )
            self._queue.put((host.name, contact))
        except TfclusterError as error:
            self._queue.put((host.name, error))

    def _until(self, done: Callable[[Answer], bool], patience_s: float) -> None:
        """Handle the queue until every host is done or has an error."""
        began = pinged = time.monotonic()
        while missing := [
            a for a in self._answers.values() if a.error is None and not done(a)
        ]:
            now = time.monotonic()
            deadline = max(began, self._worked_s) + patience_s
            if now >= deadline:
                for answer in missing:
                    _fail(answer, f"no answer in {patience_s:g} s")
                return
            if now - pinged >= HEARTBEAT_S:
                pinged = now
                for contact in self._contacts.values():
                    contact.send({"type": "ping"})
            with contextlib.suppress(Empty):
                left_s = min(deadline - now, HEARTBEAT_S)
                self._take(self._queue.get(timeout=left_s))

    def _take(self, item: Post) -> None:
        if isinstance(item, Received):
            self._frame(self._answers[item.host], item.frame)
        elif isinstance(item, Closed):
            self._gone.add(item.host)
            answer = self._answers[item.host]
            if answer.missing != 0:
                _fail(answer, item.cause)
        elif isinstance(item[1], TfclusterError):
            error = item[1]
            hint = f" ({error.hint})" if error.hint else ""
            text = error.message.removeprefix(f"{item[0]}: ") + hint
            _fail(self._answers[item[0]], text, error.exit_code)
        else:
            self._contacts[item[0]] = item[1]
            self._begin(self._answers[item[0]])

    def _frame(self, answer: Answer, frame: Frame) -> None:
        kind = frame["type"]
        if kind == "hello":
            answer.package = str(frame.get("package"))
            self._begin(answer)
        elif kind == "making":
            self._worked_s = time.monotonic()
            if frame.get("text"):
                self._say(f"{answer.host.name}: {frame['text']}")
        elif kind == "prepared":
            self._send(answer, frame)
        elif kind == "unprepared":
            _fail(answer, self._unprepared(frame), tail=_tail(frame))
        elif kind == "fault":
            _fail(answer, str(frame.get("cause")))
        elif kind in _ANSWERS and answer.missing:
            answer.missing -= 1
            answer.frames.append(frame)

    def _begin(self, answer: Answer) -> None:
        """Go on once there are both a hello and a contact, whichever comes first."""
        contact = self._contacts.get(answer.host.name)
        if contact is None or answer.package is None:
            return
        if self._prepare is None:
            self._send(answer, None)
        else:
            contact.send(self._prepare(answer.host))

    def _send(self, answer: Answer, prepared: Frame | None) -> None:
        answer.prepared = prepared
        requests = self._ask(answer)
        answer.missing = len(requests)
        for request in requests:
            self._contacts[answer.host.name].send(request)

    def _close(self) -> None:
        """Have all agents exit, and wait until they have."""
        for contact in self._contacts.values():
            contact.send({"type": "close", "grace_s": 0})
            contact.close()
        left = self._contacts.keys() - self._gone
        deadline = time.monotonic() + CLOSING_S
        with contextlib.suppress(Empty):
            while left:
                item = self._queue.get(timeout=max(0.0, deadline - time.monotonic()))
                if isinstance(item, Closed):
                    left.discard(item.host)


def _fail(
    answer: Answer,
    error: str,
    code: ExitCode = ExitCode.START,
    tail: tuple[str, ...] = (),
) -> None:
    if answer.error is None:
        answer.error, answer.code, answer.tail = error, code, tail


def _tail(frame: Frame) -> tuple[str, ...]:
    return tuple(str(line) for line in frame.get("tail") or ())
