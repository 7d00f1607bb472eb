"""Asks all hosts in parallel to keep interpreters, to list them or to end them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tfcluster.errors import ExitCode
from tfcluster.launcher.agent_connection import Closed, Received, Unopened
from tfcluster.launcher.brief_contacts import BriefContacts, Item, greeting_s
from tfcluster.model import Host
from tfcluster.schedulers.starting import Starter
from tfcluster.wire import Frame


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
    """How many answers are still to come; None: nothing has been asked yet."""


Ask = Callable[[Answer], Sequence[Frame]]
"""The requests for a host, once ``package`` and ``prepared`` are known."""

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
    """The answers of all hosts, in order; each host is asked as soon as possible.

    ``prepare`` makes the request that prepares a host before it is asked. A host that
    is not done within ``patience_s`` after all hosts were reached gets an error; the
    time starts over while an environment is made, about which ``say`` tells the user.
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
        self._ask = ask
        self._prepare = prepare
        self._unprepared = unprepared
        self._answers = {host.name: Answer(host) for host in hosts}
        self._contacts = BriefContacts(starter, "warm")

    def run(self, patience_s: float) -> list[Answer]:
        try:
            self._contacts.open([answer.host for answer in self._answers.values()])
            count = len(self._answers)
            self._until(lambda a: a.package is not None, greeting_s(count))
            self._until(lambda a: a.missing == 0, patience_s)
        finally:
            self._contacts.close()
        return list(self._answers.values())

    def _until(self, done: Callable[[Answer], bool], patience_s: float) -> None:
        """Handle the queue until every host is done or has an error."""
        began = time.monotonic()
        while missing := [
            a for a in self._answers.values() if a.error is None and not done(a)
        ]:
            now = time.monotonic()
            deadline = max(began, self._worked_s) + patience_s
            if now >= deadline:
                for answer in missing:
                    _fail(answer, f"no answer in {patience_s:g} s")
                return
            if (item := self._contacts.next(deadline - now)) is not None:
                self._take(item)

    def _take(self, item: Item) -> None:
        if isinstance(item, Received):
            self._frame(self._answers[item.host], item.frame)
        elif isinstance(item, Closed):
            answer = self._answers[item.host]
            if answer.missing != 0:
                _fail(answer, item.cause)
        elif isinstance(item, Unopened):
            error = item.error
            hint = f" ({error.hint})" if error.hint else ""
            text = error.message.removeprefix(f"{item.host}: ") + hint
            _fail(self._answers[item.host], text, error.exit_code)
        else:
            self._begin(self._answers[item.host])

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
        """Go on once there are both a hello and a contact, in either order."""
        name = answer.host.name
        if not self._contacts.is_open(name) or answer.package is None:
            return
        if self._prepare is None:
            self._send(answer, None)
        else:
            self._contacts.send(name, self._prepare(answer.host))

    def _send(self, answer: Answer, prepared: Frame | None) -> None:
        answer.prepared = prepared
        requests = self._ask(answer)
        answer.missing = len(requests)
        for request in requests:
            self._contacts.send(answer.host.name, request)


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
