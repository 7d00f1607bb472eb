"""Moves the output of tasks from pipes into log files, in a separate thread.

A slow disk delays this thread and eventually the tasks, but never the agent's loop.
Knows no frames and no processes: its caller says when a process has ended.
"""

from __future__ import annotations

import fcntl
import os
import select
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from tfcluster.agent.console_queue import ConsoleQueue, Source
from tfcluster.agent.constants import (
    DRAIN_S,
    PIPE_BYTES,
    QUIET_S,
    READ_BYTES,
    READ_PAUSE_S,
    SMALL_READ_BYTES,
    UPDATE_INTERVAL_S,
)
from tfcluster.agent.lines import Budget, ConsoleLines, Tail, decoded
from tfcluster.agent.logfile import LogFile
from tfcluster.light_dataclasses import dataclass, field

_TICK_S = 0.05
_LAST_READS = 64


@dataclass(frozen=True, slots=True)
class Drained:
    """All output of an ended process is in the file; ``tail`` has its last lines."""

    stream: int
    tail: list[str]


@dataclass(frozen=True, slots=True)
class LogTrouble:
    """The log file cannot be written or, if ``cause`` is None, can be again."""

    stream: int
    cause: str | None
    dropped_bytes: int


@dataclass(frozen=True, slots=True)
class CaptureBroken:
    """The capture thread has ended because of an error."""

    cause: str


Notice = Drained | LogTrouble | CaptureBroken


@dataclass
class _Stream:
    id: int
    fd: int
    log: LogFile
    source: Source | None
    console: ConsoleLines = field(default_factory=ConsoleLines)
    tail: Tail = field(default_factory=Tail)
    active: float = 0.0
    deadline: float | None = None
    drained: bool = False


class OutputCapture:
    """Runs the capture thread, which calls ``notify``. For the loop's thread."""

    def __init__(
        self,
        backlog: ConsoleQueue,
        on_lines: Callable[[], None],
        notify: Callable[[Notice], None],
    ) -> None:
        self._backlog = backlog
        self._on_lines = on_lines
        self._notify = notify
        self._budget = Budget()
        self._streams: dict[int, _Stream] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._selector = selectors.PollSelector()
        self._wake_out, self._wake_in = os.pipe()
        for end in (self._wake_out, self._wake_in):
            os.set_blocking(end, False)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._calls_only = select.poll()
        self._calls_only.register(self._wake_out, select.POLLIN)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    def add(
        self,
        stream: int,
        fd: int,
        path: str,
        *,
        source: Source | None,
        header: str | None = None,
    ) -> None:
        """Take over the read end of a pipe. Without a source, nothing is shown."""
        os.set_blocking(fd, False)
        self._call(
            lambda: self._add(_Stream(stream, fd, LogFile(path), source), header)
        )

    def drain(self, stream: int) -> None:
        """Read the rest of an ended process's output: ``Drained`` follows at its end,
        or when none comes for ``QUIET_S``, or after ``DRAIN_S``. Later output still
        goes to the file."""
        self._call(lambda: self._drain(stream))

    def drop(self, stream: int) -> None:
        """Read what has arrived and close, even if somebody holds the other end."""
        self._call(lambda: self._drop(stream))

    def close(self, timeout_s: float) -> bool:
        """End the thread; returns whether it ended in time."""
        self._call(self._close)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _call(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        with suppress(BlockingIOError):
            os.write(self._wake_in, b"\0")

    # From here on: the capture thread.

    def _run(self) -> None:
        try:
            while not self._closed:
                self._run_once()
        except Exception as error:
            self._notify(CaptureBroken(f"{type(error).__name__}: {error}"))

    def _run_once(self) -> None:
        busy = any(s.drained is False and s.deadline for s in self._streams.values())
        timeout = _TICK_S if busy else UPDATE_INTERVAL_S if self._streams else None
        small = False
        for key, _ in self._selector.select(timeout):
            if key.fd == self._wake_out:
                os.read(self._wake_out, 4096)
            elif (stream := self._streams.get(key.data)) is not None:
                small = 0 < self._read(stream) < SMALL_READ_BYTES
        if small:
            # Programs write line by line: waking up for each line would cost them more
            # time than their own work. The pipe buffers output in the meantime.
            self._calls_only.poll(READ_PAUSE_S * 1000)
        while self._calls:
            self._calls.popleft()()
        now = time.monotonic()
        for stream in list(self._streams.values()):
            self._tick(stream, now)

    def _add(self, stream: _Stream, header: str | None) -> None:
        with suppress(OSError):  # above the user's limit; the default size works, too
            fcntl.fcntl(stream.fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._streams[stream.id] = stream
        self._selector.register(stream.fd, selectors.EVENT_READ, stream.id)
        now = time.monotonic()
        if header is None:
            stream.log.write(b"", now)  # the file exists from the start
        else:
            stream.log.write_header(header, now)

    def _read(self, stream: _Stream) -> int:
        """Read once; returns the number of bytes, 0 if there are none (now or ever)."""
        try:
            data = os.read(stream.fd, READ_BYTES)
        except BlockingIOError:
            return 0
        now = time.monotonic()
        if not data:
            self._end(stream, now)
            return 0
        stream.active = now
        stream.log.write(data, now)
        stream.tail.feed(data)
        if stream.source is not None:
            fed = stream.console.feed(data, self._budget.room(now))
            self._show(stream.source, fed.lines)
            self._backlog.drop(stream.source, fed.dropped, fed.dropped_bytes)
        return len(data)

    def _show(self, source: Source, lines: list[bytes]) -> None:
        if lines:
            self._budget.spend(lines)
            self._backlog.put(source, [decoded(line) for line in lines])
            self._on_lines()

    def _tick(self, stream: _Stream, now: float) -> None:
        if stream.fd >= 0:
            self._refresh(stream, now)
            stream.log.tick(now)
        for cause, dropped_bytes in stream.log.changes:
            self._notify(LogTrouble(stream.id, cause, dropped_bytes))
        stream.log.changes.clear()
        waited = stream.deadline is not None and not stream.drained
        quiet = now - stream.active >= QUIET_S
        if waited and (stream.fd < 0 or quiet or now >= (stream.deadline or now)):
            stream.drained = True
            self._notify(Drained(stream.id, stream.tail.lines()))
        if stream.fd < 0 and stream.drained:
            del self._streams[stream.id]

    def _refresh(self, stream: _Stream, now: float) -> None:
        if stream.source is None:
            return
        if self._budget.room(now) and (update := stream.console.update(now)):
            self._show(stream.source, [update])
        if now - stream.active >= UPDATE_INTERVAL_S and self._backlog.settle(
            stream.source
        ):
            self._on_lines()

    def _drain(self, stream_id: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.active = time.monotonic()
            stream.deadline = stream.active + DRAIN_S

    def _drop(self, stream_id: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        for _ in range(_LAST_READS):
            if stream.fd < 0 or not self._read(stream):
                break
        if stream.fd >= 0:
            self._end(stream, time.monotonic())
        stream.deadline = stream.deadline or stream.active

    def _end(self, stream: _Stream, now: float) -> None:
        self._selector.unregister(stream.fd)
        os.close(stream.fd)
        stream.fd = -1
        stream.log.close(now)
        if stream.source is not None:
            if last := stream.console.finish():
                self._show(stream.source, [last])
            if self._backlog.settle(stream.source):
                self._on_lines()

    def _close(self) -> None:
        for stream in list(self._streams):
            self._drop(stream)
        self._closed = True
