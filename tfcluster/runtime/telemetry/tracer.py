"""Records what a task does and when: its steps, exchanges, saves, fits.

The newest events wait in memory. About once a second a thread sends them to the agent,
so a killed process loses only the events since then. ``docs/protocols.md`` ("Task and
agent") describes the event. The module does not use TensorFlow, and does not know what
a step is.
"""

from __future__ import annotations

import _thread
import atexit
import itertools
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from tfcluster.protocol.task_events import TraceMessage
from tfcluster.runtime.context import context_from
from tfcluster.runtime.errors import ContextError
from tfcluster.runtime.telemetry.agent_channel import reporter

STEPS, EXCHANGES, UPDATES = "steps", "exchanges", "updates"
CHECKPOINTS, KERAS = "checkpoints", "fit, evaluate"
"""The rows in which a viewer shows the events."""

WAITING_EVENTS = 8192
"""The most events that wait to be sent; after that, the oldest events are dropped."""
FLUSH_S = 1.0
_BATCH_EVENTS = 1000
_LAST_S = 2.0
"""How long the end of the program may wait for the agent to read the last events."""


class TracedSpan(NamedTuple):
    """Something that took time. Times are in seconds, by the tracer's clock."""

    number: int
    row: str
    name: str
    began_s: float
    ended_s: float
    amount: int
    """The bytes of an exchange, the number of exchanges in a graph, or the number of a
    step; else 0."""
    how: str
    """How an exchange was made, such as the transport's name; else empty."""
    waited_s: float
    """The part of the time that was spent waiting for others."""
    arrived_s: float
    """The time after which all ranks had reached the exchange; 0 if unknown."""


class Tracer:
    """The events of this process. No method raises or blocks; thread-safe.

    ``say`` gets a batch (see ``encoded``) in a separate thread, and ``drain(seconds)``
    waits at most that long until all batches are sent. After ``most_steps`` steps
    (None: no limit), nothing is recorded any more. ``clock`` returns seconds.
    """

    def __init__(
        self,
        say: Callable[[TraceMessage], None],
        drain: Callable[[float], None] = lambda seconds: None,
        *,
        most_steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._drain = say, drain
        self._most_steps = most_steps
        self.clock = clock
        self.on = True
        """Whether events are still recorded."""
        self._events: deque[TracedSpan] = deque(maxlen=WAITING_EVENTS)
        self._numbers = itertools.count()
        self._sending = False
        self._lock = _thread.allocate_lock()
        self._step_began_s = clock()

    def add(
        self,
        row: str,
        name: str,
        began_s: float,
        ended_s: float,
        amount: int = 0,
        how: str = "",
        waited_s: float = 0.0,
        arrived_s: float = 0.0,
    ) -> None:
        """Record an event; see ``TracedSpan``."""
        if not self.on:
            return
        if not self._sending:
            self._start()
        number = next(self._numbers)
        self._events.append(
            TracedSpan(
                number, row, name, began_s, ended_s, amount, how, waited_s, arrived_s
            )
        )

    def step(self, number: int) -> None:
        """Record that the step with this number has ended; the next step begins."""
        now_s = self.clock()
        began_s, self._step_began_s = self._step_began_s, now_s
        self.add(STEPS, "step", began_s, now_s, number)
        if self._most_steps is not None and number >= self._most_steps:
            self.on = False

    def step_begins(self) -> None:
        """Begin the next step now: the time since the last step belongs to no step."""
        self._step_began_s = self.clock()

    def flush(self) -> None:
        """Send the waiting events."""
        with self._lock:
            events: list[TracedSpan] = []
            with suppress(IndexError):
                while True:
                    events.append(self._events.popleft())
            for start in range(0, len(events), _BATCH_EVENTS):
                self._say(encoded(events[start : start + _BATCH_EVENTS]))

    def finish(self) -> None:
        """Send the last events; wait for the agent, but not for long."""
        self.flush()
        self._drain(_LAST_S)

    def forget(self) -> None:
        """Drop all events, in a child forked from the task."""
        self._events.clear()
        self._lock = _thread.allocate_lock()
        self._sending = False

    def _start(self) -> None:
        self._sending = True
        # Not threading.Thread: it would appear among the program's threads.
        _thread.start_new_thread(self._send, ())

    def _send(self) -> None:
        while self.on or self._events:
            time.sleep(FLUSH_S)
            self.flush()


def encoded(events: Sequence[TracedSpan]) -> TraceMessage:
    """A batch of at least one event, which needs no other batch.

    The text is a JSON list of rows, whose times are in microseconds.
    """
    names: dict[str, int] = {}
    base_us = int(events[0].began_s * 1e6)
    rows = []
    for _, row, name, began_s, ended_s, amount, how, waited_s, arrived_s in events:
        # Truncate them one by one, to keep the order of all beginnings and ends.
        began_us, ended_us = int(began_s * 1e6), int(ended_s * 1e6)
        words = [
            names.setdefault(row, len(names)),
            names.setdefault(name, len(names)),
            began_us - base_us,
            max(0, ended_us - began_us),
        ]
        if amount or how:
            words.append(amount)
        if how:
            words.append(names.setdefault(how, len(names)))
            words += [int(waited_s * 1e6), int(arrived_s * 1e6)]
        rows.append(words)
    text = json.dumps(rows, separators=(",", ":"))
    return TraceMessage(
        events[0].number, events[-1].number, base_us, tuple(names), text
    )


@contextmanager
def span(tracer: Tracer | None, row: str, name: str) -> Iterator[None]:
    """Record the time of the body, which does not belong to a step."""
    if tracer is None:
        yield
        return
    began_s = tracer.clock()
    tracer.step_begins()
    try:
        yield
    finally:
        tracer.add(row, name, began_s, tracer.clock())
        tracer.step_begins()


_current: Tracer | None = None
_asked = False


def tracer() -> Tracer | None:
    """This process's tracer; None unless the run records what its tasks do."""
    global _current, _asked
    if not _asked:
        _asked = True
        _current = _from_environment()
    return _current


def _from_environment() -> Tracer | None:
    try:
        options = context_from(os.environ).options
    except ContextError:
        return None  # The error is reported elsewhere.
    if not options.trace:
        return None
    channel = reporter()
    tracer_of_run = Tracer(channel.send, channel.drain, most_steps=options.trace_steps)
    atexit.register(tracer_of_run.finish)
    return tracer_of_run


def _forget() -> None:
    if _current is not None:
        _current.forget()


os.register_at_fork(after_in_child=_forget)
