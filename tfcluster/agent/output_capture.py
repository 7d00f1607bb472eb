"""Moves the output of tasks from pipes into log files, in a separate thread.

A slow disk delays this thread and eventually the tasks, but never the agent's loop.
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
from functools import partial

from tfcluster.agent.console_lines import (
    UPDATE_INTERVAL_S,
    Budget,
    ConsoleLines,
    ConsoleQueue,
    Source,
    Tail,
    decoded,
)
from tfcluster.agent.file_names import local_name
from tfcluster.base.light_dataclasses import dataclass, field

_READ_BYTES = 1 << 20
_PIPE_BYTES = 1 << 20
_SMALL_READ_BYTES = 64 << 10  # after a smaller read, pause for _READ_PAUSE_S
_READ_PAUSE_S = 0.02
_DRAIN_S = 2.0  # how long output may still arrive after the exit
_QUIET_S = 0.2  # a pipe that is silent for this long after the exit is drained
_LOG_RETRY_S = 2.0
_LOG_CHECK_S = 1.0
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_TERMINAL = os.O_NOCTTY | os.O_NONBLOCK


class LogFile:
    """A log file that survives errors and removal, and says where bytes are missing.

    For one thread. Bytes that cannot be written are counted. ``cause`` says why the
    file cannot be written now; ``changes`` has its values since the caller cleared it,
    each with the total of lost bytes.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.cause: str | None = None
        self.dropped_bytes = 0
        self.changes: list[tuple[str | None, int]] = []
        self._path = local_name(path)
        self._fd: int | None = None
        self._retry_at = 0.0
        self._checked_at = 0.0
        self._unchecked_bytes = 0
        self._gap_bytes = 0

    def write(self, data: bytes, now: float) -> None:
        if now - self._checked_at >= _LOG_CHECK_S:
            self.check(now)
        if self._fd is None and now < self._retry_at:
            self._lose(len(data))
            return
        rest = memoryview(data)
        try:
            fd = self._fd if self._fd is not None else self._open()
            while rest:
                rest = rest[os.write(fd, rest) :]
            self._set_cause(None)
        except OSError as error:
            self._close()
            self._lose(len(rest))
            self._set_cause(f"{self.path}: {error.strerror}")
            self._retry_at = now + _LOG_RETRY_S
        self._unchecked_bytes += len(data) - len(rest)

    def write_header(self, line: str, now: float) -> None:
        """Append a line of tfcluster's, after a newline if the last line lacks one."""
        try:
            fd = self._fd if self._fd is not None else self._open()
            size = os.fstat(fd).st_size
            broken = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        except OSError:
            broken = False  # the write below reports it
        self.write(b"\n" * broken + line.encode() + b"\n", now)

    def check(self, now: float) -> None:
        """Detect a file that was removed or replaced: writing would still succeed."""
        self._checked_at = now
        written, self._unchecked_bytes = self._unchecked_bytes, 0
        if self._fd is None:
            return
        held = os.fstat(self._fd)
        with suppress(OSError):
            there = os.lstat(self._path)
            if (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino):
                return
        self._close()
        if held.st_nlink == 0:
            self._lose(written)
            self._set_cause(f"{self.path}: the file was removed")

    def tick(self, now: float) -> None:
        if self._fd is None and now >= self._retry_at:
            self.write(b"", now)
        elif now - self._checked_at >= _LOG_CHECK_S:
            self.check(now)

    def close(self, now: float) -> None:
        self.check(now)
        self._close()
        if self.cause is not None:  # the count has grown since the last change
            self.changes.append((self.cause, self.dropped_bytes))

    def _set_cause(self, cause: str | None) -> None:
        if cause != self.cause:
            self.cause = cause
            self.changes.append((cause, self.dropped_bytes))

    def _open(self) -> int:
        _make_folder(os.path.dirname(self._path))
        self._fd = os.open(self._path, _FLAGS | _NO_TERMINAL, 0o600)
        if self._gap_bytes:
            lost, self._gap_bytes = self._gap_bytes, 0
            os.write(self._fd, b"\n---- %d bytes are missing here ----\n" % lost)
        return self._fd

    def _close(self) -> None:
        if self._fd is not None:
            # On network file systems, errors of earlier writes show up here. Those
            # bytes were counted as written; which ones are missing is unknown.
            with suppress(OSError):
                os.close(self._fd)
            self._fd = None

    def _lose(self, count: int) -> None:
        self.dropped_bytes += count
        self._gap_bytes += count


def _make_folder(path: str) -> None:
    """Like makedirs, but every new folder is private, not only the last one."""
    if path and not os.path.isdir(path):
        _make_folder(os.path.dirname(path))
        with suppress(FileExistsError):  # another task was faster
            os.mkdir(path, 0o700)


_TICK_S = 0.05
_LAST_READS = 64


@dataclass(eq=False)
class OutputStream:
    """A stream of output. Only the capture thread may look inside.

    In the loop's thread, ``on_drained`` gets the last lines of an ended process, and
    ``on_trouble`` why the log cannot be written (None: it can be) and the lost bytes.
    """

    fd: int
    log: LogFile
    source: Source | None
    """Without a source, nothing is shown."""
    on_drained: Callable[[list[str]], None]
    on_trouble: Callable[[str | None, int], None]
    console: ConsoleLines = field(default_factory=ConsoleLines)
    tail: Tail = field(default_factory=Tail)
    active: float = 0.0
    deadline: float | None = None
    drained: bool = False


class OutputCapture:
    """Runs the capture thread, and posts calls to the loop's thread."""

    def __init__(
        self,
        backlog: ConsoleQueue,
        post: Callable[[Callable[[], object]], None],
        on_lines: Callable[[], None],
        on_broken: Callable[[str], None],
    ) -> None:
        self._backlog = backlog
        self._post = post
        self._on_lines = on_lines
        self._on_broken = on_broken
        self._budget = Budget()
        self._streams: list[OutputStream] = []
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

    def add(self, stream: OutputStream, header: str | None = None) -> None:
        os.set_blocking(stream.fd, False)
        self._call(lambda: self._add(stream, header))

    def drain(self, stream: OutputStream) -> None:
        """Read to the end, or until none comes for ``_QUIET_S``, or ``_DRAIN_S``."""
        self._call(lambda: self._drain(stream))

    def drop(self, stream: OutputStream) -> None:
        """Read what has arrived and close, even if somebody holds the other end."""
        self._call(lambda: self._drop(stream))

    def close(self, timeout_s: float) -> bool:
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
            cause = f"output capture ended: {type(error).__name__}: {error}"
            self._post(partial(self._on_broken, cause))

    def _run_once(self) -> None:
        busy = any(s.drained is False and s.deadline for s in self._streams)
        timeout = _TICK_S if busy else UPDATE_INTERVAL_S if self._streams else None
        small = False
        for key, _ in self._selector.select(timeout):
            if key.fd == self._wake_out:
                os.read(self._wake_out, 4096)
            elif key.data.fd >= 0:
                small = 0 < self._read(key.data) < _SMALL_READ_BYTES
        if small:
            # Programs write line by line: waking up for each line would cost them more
            # time than their own work. The pipe buffers output in the meantime.
            self._calls_only.poll(_READ_PAUSE_S * 1000)
        while self._calls:
            self._calls.popleft()()
        now = time.monotonic()
        for stream in list(self._streams):
            self._tick(stream, now)

    def _add(self, stream: OutputStream, header: str | None) -> None:
        with suppress(OSError):  # above the user's limit; the default size works, too
            fcntl.fcntl(stream.fd, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._streams.append(stream)
        self._selector.register(stream.fd, selectors.EVENT_READ, stream)
        now = time.monotonic()
        if header is None:
            stream.log.write(b"", now)  # the file exists from the start
        else:
            stream.log.write_header(header, now)

    def _read(self, stream: OutputStream) -> int:
        """Read once; returns the number of bytes, 0 if there are none (now or ever)."""
        try:
            data = os.read(stream.fd, _READ_BYTES)
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
            lines, dropped = stream.console.feed(data, self._budget.room(now))
            self._show(stream.source, lines)
            self._backlog.drop(stream.source, dropped)
        return len(data)

    def _show(self, source: Source, lines: list[bytes]) -> None:
        if lines:
            self._budget.spend(lines)
            self._backlog.put(source, [decoded(line) for line in lines])
            self._post(self._on_lines)

    def _tick(self, stream: OutputStream, now: float) -> None:
        if stream.fd >= 0:
            self._refresh(stream, now)
            stream.log.tick(now)
        for cause, dropped_bytes in stream.log.changes:
            self._post(partial(stream.on_trouble, cause, dropped_bytes))
        stream.log.changes.clear()
        waited = stream.deadline is not None and not stream.drained
        quiet = now - stream.active >= _QUIET_S
        if waited and (stream.fd < 0 or quiet or now >= (stream.deadline or now)):
            stream.drained = True
            self._post(partial(stream.on_drained, stream.tail.lines()))
        if stream.fd < 0 and stream.drained:
            self._streams.remove(stream)

    def _refresh(self, stream: OutputStream, now: float) -> None:
        if stream.source is None:
            return
        if self._budget.room(now) and (update := stream.console.update(now)):
            self._show(stream.source, [update])
        if now - stream.active >= UPDATE_INTERVAL_S and self._backlog.settle(
            stream.source
        ):
            self._post(self._on_lines)

    def _drain(self, stream: OutputStream) -> None:
        stream.active = time.monotonic()
        stream.deadline = stream.active + _DRAIN_S

    def _drop(self, stream: OutputStream) -> None:
        for _ in range(_LAST_READS):
            if stream.fd < 0 or not self._read(stream):
                break
        if stream.fd >= 0:
            self._end(stream, time.monotonic())
        stream.deadline = stream.deadline or stream.active

    def _end(self, stream: OutputStream, now: float) -> None:
        self._selector.unregister(stream.fd)
        os.close(stream.fd)
        stream.fd = -1
        stream.log.close(now)
        if stream.source is not None:
            if last := stream.console.finish():
                self._show(stream.source, [last])
            if self._backlog.settle(stream.source):
                self._post(self._on_lines)

    def _close(self) -> None:
        for stream in list(self._streams):
            self._drop(stream)
        self._closed = True
