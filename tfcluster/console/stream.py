"""A standard stream: what it is, how wide it is, and writing to it.

Writes may block; callers that must not block use ``writer_thread``. A closed stream
silently discards everything.
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
    """``file`` is None if the program was started with that stream closed."""

    def __init__(self, file: TextIO | None, environ: Mapping[str, str]) -> None:
        self._file = file
        self.descriptor = _descriptor(file)
        self.is_terminal = self.descriptor is not None and is_terminal(file, environ)
        self.closed = file is None
        self._encoding = getattr(file, "encoding", None) or "utf-8"

    def same_as(self, other: Stream) -> bool:
        """Whether both go to the same place, so that their order matters."""
        if self.descriptor is None or other.descriptor is None:
            return self._file is other._file
        ours, theirs = os.fstat(self.descriptor), os.fstat(other.descriptor)
        return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)

    def size(self) -> tuple[int, int]:
        """The current columns and lines of the terminal; (80, 24) if unknown."""
        if self.descriptor is None:
            return _FALLBACK_SIZE
        try:
            columns, lines = os.get_terminal_size(self.descriptor)
        except OSError:
            return _FALLBACK_SIZE
        return columns or _FALLBACK_SIZE[0], lines or _FALLBACK_SIZE[1]

    def write(self, text: str) -> None:
        """Write all of ``text``, or set ``closed`` if nobody reads it any more."""
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
            # The reader is gone (EPIPE), the terminal hung up (EIO), or the disk is
            # full (ENOSPC): losing the echo must not end the run.
            self.closed = True


def _descriptor(file: TextIO | None) -> int | None:
    """The file's descriptor; None for a file object without one."""
    if file is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        file.flush()  # earlier output must come first
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
            # Another process that shares the terminal has made it non-blocking.
            select.select([], [descriptor], [])
