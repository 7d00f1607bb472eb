"""Sends files that tasks have written to the launcher, piece by piece.

Every step is small, so that the agent stays responsive: a folder is listed, or a piece
is read, and then other work gets its turn. The launcher asks for
each piece, so never more is queued than it has asked for.
"""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from tfcluster.agent.file_names import (
    BY_HOST,
    ENVIRONMENT,
    NEVER,
    RESULT_FILES,
    RESULT_PIECE_BYTES,
    is_excluded,
    is_inside,
    is_wanted,
    local_path,
    raw,
)
from tfcluster.agent.workdir_receiver import remember_returned, same_files
from tfcluster.protocol import messages, requests
from tfcluster.protocol.frames import ProtocolError

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from hashlib import _Hash

_TOLD_S = 2.0  # between two signs of life in a long step
_LOOKS = 500  # entries of a folder that are looked at between other work
_ROWS = 1_000  # per frame; a path has at most 4096 bytes, mostly far fewer
_ROW_BYTES = 512 << 10
_SHOWN = 100  # refused files that are named; the rest is only counted
OUTSIDE = "it is a link that leads out of the working directory"
NO_FILE = "it is not a regular file"
SHORTER = "it became shorter while it was sent"
GONE = "it is gone"


class _ReadError(Exception):
    """The file cannot be sent; the message says why."""


Refusal = tuple[str, str]
"""The path of a file that matches, and why it cannot be sent."""

Found = messages.Result | Refusal


class ResultSender:
    """Answers one launcher; ``post`` schedules a call after waiting work."""

    def __init__(
        self,
        send: Callable[[messages.ResultsMessage], None],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._send = send
        self._post = post
        self._root: bytes | None = None
        self._patterns: tuple[str, ...] = ()
        self._listing: _Listing | None = None
        self._reading: _Reading | None = None
        self._returned: dict[str, str] = {}
        self._told_s = time.monotonic()
        self._closed = False

    def obey(self, request: requests.ResultsRequest) -> None:
        match request:
            case requests.List():
                self._list(request)
            case requests.Read():
                self._read(request)
            case requests.More(number):
                self._more(number)
            case requests.Returned(path, digest):
                _check(path)
                self._returned[path] = digest

    def close(self) -> None:
        """Send nothing more, and remember which results have been returned."""
        self._closed = True
        self._drop()
        self._remember()

    def _remember(self) -> None:
        if self._root is not None:
            # If this fails, a later copy of the folder reports a conflict at worst.
            with suppress(OSError):
                remember_returned(Path(os.fsdecode(self._root)), self._returned)
        self._returned = {}

    # --- the list -------------------------------------------------------------------

    def _list(self, request: requests.List) -> None:
        self._drop()
        self._remember()
        self._root = None
        number = request.number
        if same_files(request.inodes):
            answer = messages.Listed(number, True, request.folder, (), (), 0, True)
            self._send(answer)
            return
        folder = local_path(request.folder).expanduser()
        if not folder.is_absolute():
            cause = f"{request.folder} cannot be expanded: the user has no home there"
            self._send(messages.Unlisted(number, cause))
            return
        self._root = os.path.realpath(os.fsencode(folder))
        self._patterns = request.patterns
        try:
            os.stat(self._root)
        except OSError as error:
            self._send(messages.Unlisted(number, f"{folder}: {error.strerror}"))
            return
        shown = os.fsencode(folder).decode("utf-8", "surrogateescape")
        self._listing = _Listing(self._send, number, shown)
        self._walk(self._listing, walk(self._root, self._patterns))

    def _walk(self, listing: _Listing, folders: Iterator[list[Found]]) -> None:
        if self._closed or self._listing is not listing:
            return
        try:
            results = next(folders, None)
        except OSError as error:
            name = os.fsdecode(error.filename or b"a folder")
            cause = f"{name} cannot be read: {error.strerror}"
            self._send(messages.Unlisted(listing.number, cause))
            return
        if results is None:
            listing.end()
        elif listing.add(results):
            self._show_life(listing.number)
            self._post(lambda: self._walk(listing, folders))

    # --- a file ---------------------------------------------------------------------

    def _read(self, request: requests.Read) -> None:
        self._drop()
        if self._root is None:
            raise ProtocolError("nothing has been listed")
        _check(request.path)
        if not is_wanted(request.path, self._patterns):
            raise ProtocolError(f"{request.path!r} was not listed")
        try:
            self._reading = _Reading(request, _open_below(self._root, request.path))
        except (OSError, _ReadError) as error:
            self._fail(request.number, error)

    def _show_life(self, number: int) -> None:
        """Tell the launcher now and then that a long step is still running."""
        now = time.monotonic()
        if now - self._told_s > _TOLD_S:
            self._told_s = now
            self._send(messages.Working(number))

    def _more(self, number: int) -> None:
        reading = self._reading
        if reading is None or reading.number != number:
            return  # it has failed
        try:
            offset, data = reading.offset, reading.piece()
            over = None if data else reading.over()
        except (OSError, _ReadError) as error:
            self._fail(number, error)
            return
        if over is None:
            self._send(messages.Piece(number, offset, base64.b64encode(data).decode()))
        else:
            digest, changed = over
            self._send(messages.Complete(number, digest, changed))
            self._drop()

    def _fail(self, number: int, error: Exception) -> None:
        self._drop()
        cause = str(error)
        if isinstance(error, FileNotFoundError):
            cause = GONE
        elif isinstance(error, OSError):
            cause = error.strerror or cause
        self._send(messages.Unread(number, cause))

    def _drop(self) -> None:
        if self._reading is not None:
            self._reading.close()
            self._reading = None


class _Listing:
    """Collects rows, and sends them in frames of limited size."""

    def __init__(
        self, send: Callable[[messages.ResultsMessage], None], number: int, folder: str
    ) -> None:
        self._send = send
        self.number = number
        self._folder = folder
        self._rows: list[messages.Result] = []
        self._refused: list[Refusal] = []
        self._bytes = 0
        self._count = 0
        self._unshown = 0

    def add(self, found: Sequence[Found]) -> bool:
        """Add files; False if there are too many, which has been reported."""
        for each in found:
            if isinstance(each, tuple):
                if len(self._refused) < _SHOWN:
                    self._refused.append(each)
                else:
                    self._unshown += 1
                continue
            self._count += 1
            if self._count > RESULT_FILES:
                cause = (
                    f"over {RESULT_FILES} files in {self._folder} match the patterns"
                )
                self._send(messages.Unlisted(self.number, cause))
                return False
            self._rows.append(each)
            self._bytes += 6 * len(each.path) + 128
            if len(self._rows) >= _ROWS or self._bytes > _ROW_BYTES:
                self._flush(last=False)
        return True

    def end(self) -> None:
        self._flush(last=False)
        self._flush(last=True)

    def _flush(self, *, last: bool) -> None:
        listed = messages.Listed(
            number=self.number,
            shared=False,
            folder=self._folder,
            files=tuple(self._rows),
            # Refusals are limited separately: all of them must fit into one frame.
            refused=tuple(self._refused) if last else (),
            more=self._unshown if last else 0,
            last=last,
        )
        self._send(listed)
        self._rows, self._bytes = [], 0


class _Reading:
    """An open file, of which ``size`` bytes are sent in order."""

    def __init__(self, request: requests.Read, fd: int) -> None:
        self.number = request.number
        self.offset = 0
        self._request = request
        self._fd = fd
        self._hash: _Hash = hashlib.sha256()
        self._before = _stamp(os.fstat(fd))

    def piece(self) -> bytes:
        """The next bytes; empty at the end."""
        left = self._request.size - self.offset
        return self._take(min(RESULT_PIECE_BYTES, left)) if left else b""

    def over(self) -> tuple[str, bool]:
        """The digest of all bytes, and whether the file has changed in the meantime."""
        now = _stamp(os.fstat(self._fd))
        changed = now != self._before or now[0] != self._request.size
        return self._hash.hexdigest(), changed

    def _take(self, count: int) -> bytes:
        data = os.read(self._fd, count)
        if not data:
            raise _ReadError(SHORTER)
        self._hash.update(data)
        self.offset += len(data)
        return data

    def close(self) -> None:
        os.close(self._fd)


def walk(root: bytes, patterns: Sequence[str]) -> Iterator[list[Found]]:
    """The files below ``root`` that match, a few at a time, in a fixed order.

    Links to folders are not followed. An unreadable folder is among the results. Raises
    OSError if ``root`` cannot be read.
    """
    folders = [b""]
    while folders:
        below = folders.pop()
        inner: list[bytes] = []
        results: list[Found] = []
        seen = 0
        try:
            with os.scandir(os.path.join(root, below)) as entries:
                listed = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            if not below:
                raise
            if not isinstance(error, FileNotFoundError):  # otherwise it just vanished
                text = below.decode("utf-8", "surrogateescape")
                cause = f"this folder cannot be read: {error.strerror}"
                yield [(text, cause)]
            continue
        for entry in listed:
            path = os.path.join(below, entry.name)
            text = path.decode("utf-8", "surrogateescape")
            if is_excluded(text, (*NEVER, BY_HOST)):
                continue
            if entry.is_dir(follow_symlinks=False):
                if not os.path.exists(os.path.join(entry.path, raw(ENVIRONMENT))):
                    inner.append(path)
            elif is_wanted(text, patterns):
                results += _found(root, path, text)
            seen += 1
            if seen % _LOOKS == 0:
                yield results
                results = []
        folders += reversed(inner)
        yield results


def _found(root: bytes, path: bytes, text: str) -> list[Found]:
    """The file, or why it cannot be sent; nothing if it has just vanished."""
    try:
        fd = _open_below(root, text)
    except FileNotFoundError:
        if not os.path.islink(os.path.join(root, path)):
            return []
        return [(text, "it is a link to nothing")]
    except _ReadError as error:
        return [(text, str(error))]
    except OSError as error:
        return [(text, error.strerror or str(error))]
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    mode = stat.S_IMODE(status.st_mode)
    return [messages.Result(text, status.st_size, status.st_mtime_ns, mode)]


def _open_below(root: bytes, path: str) -> int:
    """Open a regular file below ``root``, whose own links are resolved.

    Links are followed as long as they stay below ``root``. Each folder is opened
    separately and without following links, so that a link that is made in the meantime
    leads nowhere. Raises OSError or _ReadError.
    """
    real = os.path.realpath(os.path.join(root, raw(path)))
    if not real.startswith(root.rstrip(b"/") + b"/"):
        raise _ReadError(OUTSIDE)
    *folders, name = real[len(root.rstrip(b"/")) + 1 :].split(b"/")
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            inner = os.open(folder, flags, dir_fd=at)
            os.close(at)
            at = inner
        # Opening a pipe must not wait for its other end.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        if not stat.S_ISREG(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
            raise _ReadError(NO_FILE)
        fd = os.open(name, flags, dir_fd=at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _ReadError(NO_FILE)
    return fd


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _check(path: str) -> None:
    if not is_inside(path):
        raise ProtocolError(f"{path!r} is not a path within a folder")
