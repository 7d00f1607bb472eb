"""Reads log files: their last lines, and new lines as they are written.

Needs only bounded memory, whatever is in the files. Returns text unchanged: bytes that
are not UTF-8 become lone surrogates, control characters stay.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

LINE_BYTES = 16 << 10
"""Longer lines are cut, as on the channel."""

_BLOCK = 64 << 10
_TAIL_BYTES = 8 << 20
_PORTION = 1 << 20
_POLL_S = 0.1


class FollowEnd(Protocol):
    """A ``threading.Event`` or something with the same ``wait``."""

    def wait(self, timeout: float | None = None) -> bool: ...


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines, also an unfinished one, of the last 8 MiB. Raises OSError."""
    with path.open("rb") as file:
        lines, _ = _tail(file.fileno(), count)
    return lines


def follow(
    paths: Mapping[str, Path], stop: FollowEnd, *, last: int | None = 10
) -> Iterator[tuple[str, list[str]]]:
    """Lines of several growing files as they are written, in batches with their label.

    Begins with the ``last`` lines of each file, or with its first line if ``last`` is
    None. A file may appear later. Once ``stop`` is set, yields everything written by
    then, and ends.
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
    def __init__(self, path: Path, last: int | None) -> None:
        self._path = path
        self._last: int | None = last
        self._descriptor = -1
        self._offset = 0
        self._rest = b""
        self._skipping = False
        """Whether a line was cut and its rest must be skipped."""

    def read(self) -> list[str]:
        if self._descriptor < 0:
            return self._open()
        data = os.pread(self._descriptor, _PORTION, self._offset)
        self._offset += len(data)
        return self._cut(data)

    def unfinished(self) -> list[str]:
        return [_text(self._rest)] if self._rest and not self._skipping else []

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _open(self) -> list[str]:
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            # The file may appear later, and is then read from its first line.
            self._last = None
            return []
        lines: list[str] = []
        if self._last is not None:
            lines, self._offset = _tail(self._descriptor, self._last, complete=True)
        # Read now: a reader that follows a finished run stops when nothing comes.
        return lines + self.read()

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
    """The last lines and the offset after them; ``complete``: only finished lines."""
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
