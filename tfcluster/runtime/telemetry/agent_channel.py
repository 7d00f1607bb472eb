"""What a task says to its agent: one line of JSON at a time on an inherited socket.

``docs/protocols.md`` ("Task and agent") lists the events. Saying something never
blocks, never raises, and is silently nothing where nobody listens. Knows neither
TensorFlow nor what a step is.
"""

from __future__ import annotations

import _thread
import math
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from tfcluster.runtime.telemetry.stack_dump import stacks_text
from tfcluster.wire import Decoder, WireError, encode

STEP_INTERVAL_S = 1.0
"""Steps are reported at most so often."""

_MAX_TEXT = 64 * 1024
_MAX_PENDING_BYTES = 256 * 1024
_NEVER = -math.inf


@dataclass(frozen=True, slots=True)
class Waiting:
    """A rank that waits for others: since how long, in what, for whom if known."""

    since_s: float
    what: str
    ranks: tuple[int, ...] = ()

    def as_event(self) -> dict[str, Any]:
        return {
            "since_s": round(self.since_s, 3),
            "what": self.what,
            "for": list(self.ranks),
        }


class Reporter:
    """The task's end of its events socket; safe to use from any thread.

    A process that is forked off a task is not the task: its copies fall silent.
    """

    def __init__(
        self,
        connection: socket.socket | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._clock = clock
        # Reentrant: a signal handler may report in the midst of a report.
        self._lock = threading.RLock()
        self._pending = bytearray()
        self._step_sent = _NEVER
        self._step_held_back: dict[str, Any] | None = None
        self._waiting: Callable[[], Waiting | None] | None = None
        self._listening = False
        self._exchanged = False

    def phase(self, text: str) -> None:
        """What the task does while it does not train yet: ``joining``."""
        self._say({"type": "phase", "phase": _cut(text)})

    def step(self, step: int, steps_per_s: float, wait_share: float) -> None:
        """``step`` steps are done; ``wait_share`` of the time went into waiting.

        Kept back where the last report is younger than ``STEP_INTERVAL_S``.
        """
        event = {
            "type": "step",
            "step": int(step),
            "steps_per_s": _finite(steps_per_s),
            "wait_share": _finite(wait_share),
        }
        now = self._clock()
        if now - self._step_sent < STEP_INTERVAL_S:
            self._step_held_back = event
            return
        self._step_sent = now
        self._step_held_back = None
        self._say(event)

    def serving(self, counts: Mapping[str, float]) -> None:
        """What a ps has done so far; said at most once a second by who calls it."""
        said = {key: _finite(value) for key, value in counts.items()}
        self._say({"type": "serving", **said})

    def waiting(self, waiting: Waiting) -> None:
        """The task has been waiting for others for long."""
        self._say({"type": "waiting", **waiting.as_event()})

    def warning(self, text: str) -> None:
        """Something for the person at the console."""
        self._say({"type": "warning", "text": _cut(text)})

    def failure(self, cause: str) -> None:
        """One sentence that says why the task will exit."""
        self._say({"type": "failure", "cause": _cut(cause)})

    def exchanged(self) -> None:
        """The task has exchanged something with the others; said once."""
        if not self._exchanged:
            self._exchanged = True
            self._say({"type": "exchanged"}, always=True)

    def flush(self) -> None:
        """Report the last step, if it was kept back."""
        held_back, self._step_held_back = self._step_held_back, None
        if held_back is not None:
            self._say(held_back)

    def on_waiting(self, ask: Callable[[], Waiting | None]) -> None:
        """Call ``ask``, from another thread, when the agent wants to know."""
        self._waiting = ask

    def listen(self) -> None:
        """Answer the agent's questions from a thread of our own, from now on."""
        if self._connection is None or self._listening:
            return
        self._listening = True
        # Not threading.Thread: the program's own list of threads is none of our
        # business, and nobody may wait for this one at exit.
        _thread.start_new_thread(self._answer, (self._connection,))

    def adopt(self, connection: socket.socket) -> None:
        """Speak on this connection, and listen there, if we have been silent so far."""
        if self._connection is None:
            self._connection = connection
            self.listen()

    def abandon(self) -> None:
        """Fall silent, in a process that is a copy of the task's.

        It may yet become the one that trains, and then adopts a line of its own.
        """
        connection, self._connection = self._connection, None
        self._lock = threading.RLock()
        self._waiting = None
        self._pending.clear()
        self._step_held_back = None
        self._listening = self._exchanged = False
        if connection is not None:
            connection.close()

    def _say(self, event: dict[str, Any], *, always: bool = False) -> None:
        with self._lock:
            if self._connection is None:
                return
            line = encode(event)
            full = len(self._pending) + len(line) > _MAX_PENDING_BYTES
            if full and not always:
                return
            self._pending += line
            self._send_pending(self._connection)

    def _send_pending(self, connection: socket.socket) -> None:
        try:
            while self._pending:
                flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
                del self._pending[: connection.send(self._pending, flags)]
        except BlockingIOError:
            return  # The agent is busy; the rest goes out with the next event.
        except OSError:
            self._connection = None  # The agent is gone. Its socket dies with us.

    def _answer(self, connection: socket.socket) -> None:
        frames = Decoder()
        try:
            while data := connection.recv(4096):
                for frame in frames.feed(data):
                    if frame["type"] == "stacks":
                        self._say(self._stack())
        except (OSError, WireError):
            return  # Nobody is left to be told.

    def _stack(self) -> dict[str, Any]:
        text, waiting = stacks_text(_thread.get_ident()), None
        try:
            waiting = self._waiting and self._waiting()
        except Exception as error:
            # The question comes at any time, also in the midst of a teardown.
            text = f"(what it waits for is unknown: {error!r})\n{text}"
        return {
            "type": "stack",
            "text": _cut(text),
            "waiting": waiting.as_event() if waiting else None,
        }


_current: Reporter | None = None


def reporter() -> Reporter:
    """This process's reporter: silent, unless it is a task's own process."""
    global _current
    if _current is None:
        _current = Reporter(claim(os.environ, os.getpid()))
    return _current


def be_silent() -> None:
    """This process is below the task's own one, and may not speak for it."""
    global _current
    if _current is None:
        _current = Reporter()


def _fall_silent() -> None:
    if _current is not None:
        _current.abandon()


os.register_at_fork(after_in_child=_fall_silent)


def claim(env: MutableMapping[str, str], pid: int) -> socket.socket | None:
    """Take over the socket that TFCLUSTER_EVENTS names, for process ``pid`` alone.

    What the task executes inherits the variable but not the descriptor, whose number
    may then be any other file: so the owner is written beside it.
    """
    number = env.get("TFCLUSTER_EVENTS", "")
    owner = env.get("TFCLUSTER_EVENTS_OWNER", str(pid))
    if not (number.isascii() and number.isdecimal()) or owner != str(pid):
        return None
    descriptor = int(number)
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        os.set_inheritable(descriptor, False)
        connection = socket.socket(fileno=descriptor)
    except (OSError, OverflowError):
        return None
    if (connection.family, connection.type) != (socket.AF_UNIX, socket.SOCK_STREAM):
        connection.detach()
        return None
    env["TFCLUSTER_EVENTS_OWNER"] = str(pid)
    return connection


def _finite(number: float) -> float | None:
    """JSON has no word for the others."""
    return round(float(number), 4) if math.isfinite(number) else None


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ..."
