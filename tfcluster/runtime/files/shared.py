"""Finds files that several ranks write, where they cannot have layers of their own."""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import suppress

from tfcluster.runtime.files.events import EVENTS, change_of
from tfcluster.runtime.telemetry.agent_channel import reporter

_BROKEN = (FileExistsError, FileNotFoundError, EOFError)
"""Errors of a rank that another rank may have caused, by changing a file."""
_BROKEN_ARCHIVES = ("zipfile.BadZipFile", "tarfile.ReadError")
"""More of them, by their names: these modules are for the program to import."""


class SharedFiles:
    """The audit hook; ``path`` is of a file in which ranks list what they change."""

    def __init__(self, path: str, rank: int, work: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(path, flags, 0o600)
        self._rank = rank
        self._work = work
        self._process = os.getpid()
        self._read_to = 0
        self._own: dict[str, str] = {}
        """Paths that this rank has changed -> its line in the program."""
        self._others: dict[str, str] = {}
        """Paths that other ranks change -> their rank."""
        self._has_warned = False
        self._busy = False

    def hook(self, event: str, args: tuple[object, ...]) -> None:
        """Called by Python before each change, and for many other events."""
        if event not in EVENTS or self._busy or os.getpid() != self._process:
            return
        self._busy = True
        try:
            with suppress(OSError, ValueError):
                change = change_of(event, args, sys._getframe(1), self._work)
                for path in change.paths if change else ():
                    self._note(path, change.line if change else "")
        finally:
            self._busy = False

    def _note(self, path: str, line: str) -> None:
        if path in self._own or "\n" in path:
            return
        self._own[path] = line
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            self._read()
            entry = os.fsencode(f"{self._rank} {path}\n")
            self._read_to += os.write(self._file, entry)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
        if self._has_warned or path not in self._others:
            return
        self._has_warned = True
        text = f"{self._sentence(path)} and has no files of its own on this host"
        reporter().warning(text)
        sys.stderr.write(f"tfcluster: warning: {text}\n")

    def _read(self) -> None:
        """Read what has been added to the list."""
        size = os.fstat(self._file).st_size
        added = os.pread(self._file, size - self._read_to, self._read_to)
        self._read_to = size
        for entry in os.fsdecode(added).splitlines():
            rank, _, path = entry.partition(" ")
            if rank != str(self._rank):
                self._others[path] = rank

    def _sentence(self, path: str) -> str:
        where = f" ({self._own[path]})" if self._own[path] else ""
        return (
            f"ranks {self._others[path]} and {self._rank} both change {path}{where}: "
            "every rank runs the whole program"
        )

    def cause_of(self, error: BaseException) -> str | None:
        """What other ranks may have to do with an error; None if nothing is known."""
        kind = type(error)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if not isinstance(error, _BROKEN) and name not in _BROKEN_ARCHIVES:
            return None
        with suppress(OSError):
            self._read()
        both = [path for path in self._own if path in self._others]
        return self._sentence(both[-1]) if both else None
