"""Reading log files: their last lines, and new ones as they come.

Bounded in memory whatever the files hold. Gives text as it is: bytes that are not UTF-8
become lone surrogates, control characters stay. Knows nothing of tasks or terminals.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

LINE_BYTES = 16 << 10
"""A longer line is cut, as the channel cuts it."""

_BLOCK = 64 << 10
_TAIL_BYTES = 8 << 20
_PORTION = 1 << 20
_POLL_S = 0.1


class Stop(Protocol):
    """A ``threading.Event``, or something that waits like it."""

    def wait(self, timeout: float | None = None) -> bool: ...


def last_lines(path: Path, count: int) -> list[str]:
    """The last ``count`` lines, read from the end; an unfinished one counts too.

    Looks at no more than the last 8 MiB. Raises OSError.
    """
    with path.open("rb") as file:
        lines, _ = _tail(file.fileno(), count)
    return lines


def follow(
    paths: Mapping[str, Path], stop: Stop, *, last: int = 10
) -> Iterator[tuple[str, list[str]]]:
    """Lines of several growing files as they come, each batch with its label.

    Begins with the ``last`` lines of each. A file may come later, be cut or be
    replaced. Ends, with all that is there by then, once ``stop`` is set.
    """
    growing = {label: _Growing(path, last) for label, path in paths.items()}
    try:
        stopped = False
        while True:
            came = False
            for label, file in growing.items():
                if lines := file.read():
                    came = True
                    yield label, lines
            if stopped and not came:
                break
            stopped = stop.wait(0 if came else _POLL_S) or stopped
        for label, file in growing.items():
            if lines := file.unfinished():
                yield label, lines
    finally:
        for file in growing.values():
            file.close()


class _Growing:
    """One file that is written by somebody else."""

    def __init__(self, path: Path, last: int) -> None:
        self._path = path
        self._last: int | None = last
        self._descriptor = -1
        self._offset = 0
        self._rest = b""
        self._skipping = False
        """The rest of a line that was cut is passed over up to its end."""

    def read(self) -> list[str]:
        """New complete lines, of at most 1 MiB at once."""
        if self._descriptor < 0 or self._was_replaced():
            return self._open()
        if os.fstat(self._descriptor).st_size < self._offset:
            self._offset, self._rest, self._skipping = 0, b"", False
        data = os.pread(self._descriptor, _PORTION, self._offset)
        self._offset += len(data)
        return self._cut(data)

    def unfinished(self) -> list[str]:
        """The last line, if it never ended."""
        return [_text(self._rest)] if self._rest and not self._skipping else []

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> list[str]:
        left = self.unfinished()
        self.close()
        self._offset, self._rest, self._skipping = 0, b"", False
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            # It may come later, and then from its first line on.
            self._last = None
            return left
        if self._last is None:
            return left
        lines, self._offset = _tail(self._descriptor, self._last, complete=True)
        self._last = None
        return left + lines

    def _was_replaced(self) -> bool:
        try:
            there = self._path.stat()
        except OSError:
            return False  # removed: what is open can still be read to its end
        ours = os.fstat(self._descriptor)
        replaced = (there.st_dev, there.st_ino) != (ours.st_dev, ours.st_ino)
        return replaced and ours.st_size <= self._offset

    def _cut(self, data: bytes) -> list[str]:
        *whole, rest = (self._rest + data).split(b"\n")
        if self._skipping and whole:
            del whole[0]
            self._skipping = False
        lines = [_text(line) for line in whole]
        if self._skipping:
            rest = b""
        elif len(rest) > LINE_BYTES:
            lines.append(_text(rest))
            rest, self._skipping = b"", True
        self._rest = rest
        return lines


def _tail(
    descriptor: int, count: int, *, complete: bool = False
) -> tuple[list[str], int]:
    """The last lines, and the offset behind them; only ended ones if ``complete``."""
    end = size = os.fstat(descriptor).st_size
    data = b""
    while end > 0 and len(data) < _TAIL_BYTES and data.count(b"\n") <= count:
        begin = max(0, end - _BLOCK)
        data = os.pread(descriptor, end - begin, begin) + data
        end = begin
    *lines, rest = data.split(b"\n")
    if complete:
        size -= len(rest)
    elif rest:
        lines.append(rest)
    if end > 0 and lines and len(lines) <= count:
        lines[0] = "…".encode() + lines[0][-LINE_BYTES:]  # its beginning was not read
    return [_text(line) for line in lines[-count:]] if count > 0 else [], size


def _text(line: bytes) -> str:
    if len(line) > LINE_BYTES + 3:
        line = line[:LINE_BYTES] + "…".encode()
    return line.decode("utf-8", errors="surrogateescape")
