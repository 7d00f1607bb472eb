"""One of the standard streams: what it is, how wide it is, and writing to it.

Writes wait for as long as the other side makes them wait; who must not wait, lets a
lane do it. A stream that has closed swallows everything in silence.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
from collections.abc import Mapping
from typing import TextIO

from tfcluster.console.style import is_terminal

_FALLBACK_SIZE = (80, 24)


class Stream:
    """``file`` is None where a program was started with that stream closed."""

    def __init__(self, file: TextIO | None, environ: Mapping[str, str]) -> None:
        self._file = file
        self.descriptor = _descriptor(file)
        self.is_terminal = self.descriptor is not None and is_terminal(file, environ)
        self.closed = file is None
        self._encoding = getattr(file, "encoding", None) or "utf-8"

    def same_as(self, other: Stream) -> bool:
        """Both lead to one and the same place, so that their order matters."""
        if self.descriptor is None or other.descriptor is None:
            return self._file is other._file
        ours, theirs = os.fstat(self.descriptor), os.fstat(other.descriptor)
        return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)

    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal as it is now."""
        if self.descriptor is None:
            return _FALLBACK_SIZE
        try:
            columns, lines = os.get_terminal_size(self.descriptor)
        except OSError:
            return _FALLBACK_SIZE
        return columns or _FALLBACK_SIZE[0], lines or _FALLBACK_SIZE[1]

    def write(self, text: str) -> None:
        """Write it all, or notice that nobody reads any more."""
        if self.closed or not text:
            return
        try:
            if self.descriptor is None and self._file is not None:
                self._file.write(text)
                self._file.flush()
            elif self.descriptor is not None:
                data = text.encode(self._encoding, errors="backslashreplace")
                _write_all(self.descriptor, data)
        except (OSError, ValueError):
            # The reader has gone (EPIPE), the terminal hung up (EIO), the disk is
            # full (ENOSPC): the run is worth more than its echo.
            self.closed = True


def _descriptor(file: TextIO | None) -> int | None:
    """The file's descriptor; None for one that only looks like a file."""
    if file is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        file.flush()  # what was printed before us comes before us
    try:
        return file.fileno()
    except (io.UnsupportedOperation, AttributeError, ValueError):
        return None


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            # Somebody who shares the terminal has made it non-blocking.
            select.select([], [descriptor], [])
