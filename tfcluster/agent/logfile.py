"""A log file that survives errors and removal, and says where bytes are missing.

Appends raw bytes. Bytes that cannot be written are counted, and the file is retried
every few seconds. Knows no tasks and no lines.
"""

from __future__ import annotations

import os
from contextlib import suppress

from tfcluster.agent.constants import LOG_CHECK_S, LOG_RETRY_S
from tfcluster.agent.os_encoding import local_name

_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_TERMINAL = os.O_NOCTTY | os.O_NONBLOCK


class LogFile:
    """For one thread. ``cause`` says why the file cannot be written now, or is None.

    ``changes`` lists the values of ``cause`` since the caller last cleared it, each
    with the total of lost bytes.
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
        """Append all of ``data``, or count the bytes that could not be written."""
        if now - self._checked_at >= LOG_CHECK_S:
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
            self._retry_at = now + LOG_RETRY_S
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
        """Retry or check the file while nothing is written."""
        if self._fd is None and now >= self._retry_at:
            self.write(b"", now)
        elif now - self._checked_at >= LOG_CHECK_S:
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
    """Make folders as makedirs does, but make every new folder private, not only the
    last one."""
    if path and not os.path.isdir(path):
        _make_folder(os.path.dirname(path))
        with suppress(FileExistsError):  # another task was faster
            os.mkdir(path, 0o700)
