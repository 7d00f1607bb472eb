"""Reports events to the task's agent, as lines of JSON on an inherited socket.

``docs/protocols.md`` ("Task and agent") lists the events. Reporting never blocks, never
raises, and does nothing if there is no agent. The module does not use TensorFlow, and
does not know what a step is.
"""

from __future__ import annotations

import _thread
import math
import os
import select
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial

from tfcluster.protocol import local
from tfcluster.protocol.frames import encode, type_of
from tfcluster.protocol.task_events import (
    ColdStart,
    Epoch,
    EpochPosition,
    ExchangedMessage,
    ExchangesMessage,
    ExchangeTotal,
    FailureMessage,
    NoteMessage,
    PhaseMessage,
    Stack,
    Step,
    TaskEvent,
    Waiting,
    WarningMessage,
)
from tfcluster.protocol.wire import Decoder, WireError
from tfcluster.runtime.telemetry.stack_dump import stacks_text

STEP_INTERVAL_S = 1.0
"""The minimum time between two reports of steps."""

_MOST_EPOCHS = 200
"""The most epochs of one interval that are reported."""

TOTALS_INTERVAL_S = 10.0
"""The minimum time between two reports of the cost of exchanges."""

_MAX_TEXT = 64 * 1024
_MAX_NAME = 64
_MAX_METRICS = 32
_MAX_PENDING_BYTES = 256 * 1024
_NEVER = -math.inf
_Position = Callable[[], EpochPosition | None]


class Reporter:
    """The task's end of its events socket; thread-safe. No method raises or blocks.

    ``clock`` returns seconds. In a child forked from the task, the copy stops
    reporting, because the child is not the task.
    """

    def __init__(
        self,
        connection: socket.socket | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection = connection
        self._clock = clock
        # Reentrant: a signal handler may interrupt a report with another report.
        self._lock = threading.RLock()
        self._pending = bytearray()
        self._step_sent = _NEVER
        self._step_held_back: Callable[[], Step] | None = None
        self._epoch_sent = self._totals_sent = _NEVER
        self._epochs_held_back: list[Epoch] = []
        self._last_step: int | None = None
        self.position: _Position = lambda: None
        """The program's position in ``fit``, for the next step."""
        self.totals: Callable[[], Sequence[ExchangeTotal]] = tuple
        """The cost of the exchanges so far."""
        self._waiting: Callable[[], Waiting | None] | None = None
        self._listening = False
        self.has_exchanged = False

    def phase(self, text: str) -> None:
        """Report the task's activity before it trains: ``joining``."""
        self.send(PhaseMessage(_cut(text)))

    def step(
        self,
        step: int,
        steps_per_s: float,
        wait_share: float,
        exchanged_bytes: int | None = None,
    ) -> None:
        """Report ``step`` finished steps.

        ``wait_share`` is the fraction (0 to 1) of time spent waiting; it and
        ``steps_per_s`` may be NaN. ``exchanged_bytes`` is the total so far. The report
        is delayed until ``flush`` if the last report was less than STEP_INTERVAL_S
        seconds ago.
        """
        self._last_step = int(step)
        # Most steps never become an event.
        report = partial(
            _step, step, steps_per_s, wait_share, exchanged_bytes, self.position
        )
        now = self._clock()
        if now - self._step_sent < STEP_INTERVAL_S:
            self._step_held_back = report
            return
        self._step_sent = now
        self._step_held_back = None
        self.send(report())
        if now - self._totals_sent >= TOTALS_INTERVAL_S:
            self._totals_sent = now
            self._say_totals()

    def epoch(self, epoch: int, metrics: Mapping[str, object]) -> None:
        """Report the end of an epoch, counted from 1, and its metrics.

        If the last such report was less than STEP_INTERVAL_S seconds ago, this report
        is delayed until ``flush`` or a later report. Of very many that are delayed,
        every other one is left out.
        """
        event = Epoch(int(epoch), self._last_step, numbers(metrics))
        self._epochs_held_back.append(event)
        now = self._clock()
        if now - self._epoch_sent < STEP_INTERVAL_S:
            if len(self._epochs_held_back) > _MOST_EPOCHS:
                del self._epochs_held_back[-2::-2]
            return
        self._epoch_sent = now
        # A long validation may follow.
        self._flush_step()
        self._flush_epochs()

    @contextmanager
    def keeping_position(self) -> Iterator[None]:
        """A context that may set ``position``; its old value is restored at the end."""
        before = self.position
        try:
            yield
        finally:
            self.position = before

    def _say_totals(self) -> None:
        if totals := tuple(self.totals()):
            self.send(ExchangesMessage(totals))

    def warning(self, text: str) -> None:
        """Report a warning, which is shown on the console."""
        self.send(WarningMessage(_cut(text)))

    def note(self, text: str) -> None:
        """Report a note that affects no result; it is shown on the console."""
        self.send(NoteMessage(_cut(text)))

    def cold_start(self, text: str) -> None:
        """Report why the task starts again in a fresh interpreter, now and later."""
        self.send(ColdStart(_cut(text)))

    def failure(self, cause: str) -> None:
        """Report one sentence that says why the task is about to exit."""
        self.send(FailureMessage(_cut(cause)))

    def exchanged(self) -> None:
        """Report, once, that the task takes part in what all ranks compute.

        It has exchanged something with other ranks, or computes everything itself.
        """
        if not self.has_exchanged:
            self.has_exchanged = True
            self.send(ExchangedMessage(), always=True)

    def flush(self) -> None:
        """Report the last step and the epochs whose reports were delayed."""
        if self._flush_step():
            self._say_totals()
        self._flush_epochs()

    def drain(self, timeout_s: float) -> None:
        """Wait until everything is sent, but not for longer than ``timeout_s``."""
        until = time.monotonic() + timeout_s
        while self._pending and (connection := self._connection) is not None:
            left_s = until - time.monotonic()
            poll = select.poll()
            poll.register(connection, select.POLLOUT)
            if left_s <= 0 or not poll.poll(left_s * 1000):
                return
            with self._lock:
                self._send_pending(connection)

    def _flush_step(self) -> bool:
        """Report the last step, if its report was delayed; return whether it was."""
        held_back, self._step_held_back = self._step_held_back, None
        if held_back is not None:
            self.send(held_back())
        return held_back is not None

    def _flush_epochs(self) -> None:
        held_back, self._epochs_held_back = self._epochs_held_back, []
        for event in held_back:
            self.send(event)

    def on_waiting(self, ask: Callable[[], Waiting | None]) -> None:
        """Let another thread call ``ask`` when the agent requests stacks."""
        self._waiting = ask
        self.listen()

    def listen(self) -> None:
        """Start a thread that answers the agent's requests."""
        if self._connection is None or self._listening:
            return
        self._listening = True
        # Not threading.Thread: it would appear among the program's threads, and Python
        # would wait for it at exit.
        _thread.start_new_thread(self._answer, (self._connection,))

    def adopt(self, connection: socket.socket) -> None:
        """Use this connection from now on, unless there already is one."""
        if self._connection is None:
            self._connection = connection
            self.listen()

    def abandon(self) -> None:
        """Stop reporting, in a child forked from the task.

        If the child becomes the process that trains, it adopts its own connection.
        """
        connection, self._connection = self._connection, None
        self._lock = threading.RLock()
        self._waiting = None
        self._pending.clear()
        self._step_held_back, self._epochs_held_back = None, []
        self._listening = self.has_exchanged = False
        if connection is not None:
            connection.close()

    def send(self, event: TaskEvent, *, always: bool = False) -> None:
        """Send an event; it is lost if ``always`` is not set and too many wait."""
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
            return  # The agent is busy; the rest is sent with the next event.
        except OSError:
            self._connection = None  # The agent is gone.

    def _answer(self, connection: socket.socket) -> None:
        frames = Decoder()
        try:
            while data := connection.recv(4096):
                for frame in frames.feed(data):
                    if frame["type"] == type_of(local.StacksMessage):
                        self.send(self._stack())
        except (OSError, WireError):
            return  # The agent is gone.

    def _stack(self) -> Stack:
        text, waiting = stacks_text(_thread.get_ident()), None
        try:
            waiting = self._waiting and self._waiting()
        except Exception as error:
            # Requests come at any time, even during interpreter shutdown.
            text = f"(what it waits for is unknown: {error!r})\n{text}"
        return Stack(_cut(text), waiting)


_current: Reporter | None = None


def reporter() -> Reporter:
    """This process's reporter; it reports nothing outside of a task's own process."""
    global _current
    if _current is None:
        _current = Reporter(claim(os.environ, os.getpid()))
    return _current


def be_silent() -> None:
    """Report nothing: this is a descendant of the task's process."""
    global _current
    if _current is None:
        _current = Reporter()


def _fall_silent() -> None:
    if _current is not None:
        _current.abandon()


os.register_at_fork(after_in_child=_fall_silent)


def claim(env: MutableMapping[str, str], pid: int) -> socket.socket | None:
    """Take over the socket whose descriptor is TFCLUSTER_EVENTS, for process ``pid``.

    Processes that the task starts inherit the variable, but there the number may belong
    to any other file. So the owner is recorded in TFCLUSTER_EVENTS_OWNER.
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


def numbers(metrics: Mapping[str, object]) -> dict[str, float | None]:
    """The numbers among metrics, for an event; None for NaN and infinity."""
    rounded_by_name: dict[str, float | None] = {}
    for name, value in metrics.items():
        if len(rounded_by_name) == _MAX_METRICS:
            break
        try:
            if getattr(value, "shape", ()) != ():
                continue  # NumPy warns about an array used as a number
            number = float(value)  # type: ignore[arg-type]  # it may be anything
        except Exception:
            # The program's callbacks may put anything into the logs.
            continue
        rounded = float(f"{number:.6g}")
        rounded_by_name[str(name)[:_MAX_NAME]] = (
            rounded if math.isfinite(rounded) else None
        )
    return rounded_by_name


def _step(
    step: int,
    steps_per_s: float,
    wait_share: float,
    exchanged_bytes: int | None,
    position: _Position,
) -> Step:
    try:
        where = position()
    except Exception:
        # The program's metrics may be anything, and must not end it here.
        where = None
    rate, share = _finite(steps_per_s), _finite(wait_share)
    return Step(int(step), rate, share, exchanged_bytes, where)


def _finite(number: float) -> float | None:
    """The number with four digits; None for NaN and infinity, which JSON lacks."""
    return round(float(number), 4) if math.isfinite(number) else None


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ..."
