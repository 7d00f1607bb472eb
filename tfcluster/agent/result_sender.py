"""Sends files that tasks have written to the launcher, piece by piece.

Every step is small, so that the agent stays responsive, and the launcher asks for each
piece, so that never more is queued than it has asked for.
"""

from __future__ import annotations

import base64
import errno
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
    check_inside,
    is_excluded,
    is_wanted,
    local_path,
    raw,
)
from tfcluster.agent.workdir_receiver import remember_returned, same_files
from tfcluster.protocol import messages, requests
from tfcluster.protocol.frames import ProtocolError

_ALIVE_S = 2.0  # between two signs of life in a long step
_BATCH = 40  # entries of a folder: their names always fit into one frame
OUTSIDE = "it is a link that leads out of the working directory"
NO_FILE = "it is not a regular file"
SHORTER = "it became shorter while it was sent"
GONE = "it is gone"


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
        self._listing: Iterator[messages.ResultsMessage | None] = iter(())
        self._reading: _Reading | None = None
        self._returned: dict[str, str] = {}

    def obey(self, request: requests.ResultsRequest) -> None:
        match request:
            case requests.List():
                self._list(request)
            case requests.Read():
                self._read(request)
            case requests.More(number):
                self._more(number)
            case requests.Returned(path, digest):
                check_inside(path)
                self._returned[path] = digest

    def close(self) -> None:
        self._listing = iter(())
        self._drop()
        self._remember()

    def _remember(self) -> None:
        if self._root is not None:
            # If this fails, a later copy of the folder reports a conflict at worst.
            with suppress(OSError):
                remember_returned(Path(os.fsdecode(self._root)), self._returned)
        self._returned = {}

    def _list(self, request: requests.List) -> None:
        self.close()
        self._root = None
        number = request.number
        if same_files(request.inodes):
            answer = messages.Listed(number, True, request.folder, (), (), last=True)
            self._send(answer)
            return
        folder = local_path(request.folder).expanduser()
        if not folder.is_absolute():
            cause = f"{request.folder} cannot be expanded: the user has no home there"
            self._send(messages.Unlisted(number, cause))
            return
        self._root = os.path.realpath(os.fsencode(folder))
        self._patterns = request.patterns
        shown = os.fsencode(folder).decode("utf-8", "surrogateescape")
        files = walk(self._root, request.patterns)
        self._listing = _listed(number, shown, files)
        self._continue(self._listing)

    def _continue(self, listing: Iterator[messages.ResultsMessage | None]) -> None:
        if listing is not self._listing:
            return  # closed, or replaced by a newer one
        with suppress(StopIteration):
            answer = next(listing)
            self._post(lambda: self._continue(listing))
            if answer is not None:
                self._send(answer)

    def _read(self, request: requests.Read) -> None:
        self._drop()
        if self._root is None:
            raise ProtocolError("nothing has been listed")
        check_inside(request.path)
        if not is_wanted(request.path, self._patterns):
            raise ProtocolError(f"{request.path!r} was not listed")
        try:
            self._reading = _Reading(request, _open_below(self._root, request.path))
        except OSError as error:
            self._fail(request.number, error)

    def _more(self, number: int) -> None:
        if self._reading is None or self._reading.number != number:
            return  # it has failed
        try:
            answer = self._reading.answer()
        except OSError as error:
            self._fail(number, error)
            return
        self._send(answer)
        if isinstance(answer, messages.Complete):
            self._drop()

    def _fail(self, number: int, error: OSError) -> None:
        self._drop()
        gone = isinstance(error, FileNotFoundError)
        cause = GONE if gone else error.strerror or str(error)
        self._send(messages.Unread(number, cause))

    def _drop(self) -> None:
        if self._reading is not None:
            self._reading.close()
            self._reading = None


class _Reading:
    """An open file, of which ``size`` bytes are sent in order."""

    def __init__(self, request: requests.Read, fd: int) -> None:
        self.number = request.number
        self._size = request.size
        self._offset = 0
        self._fd = fd
        self._hash = hashlib.sha256()
        self._before = _stamp(fd)

    def answer(self) -> messages.Piece | messages.Complete:
        left = self._size - self._offset
        if not left:
            now = _stamp(self._fd)
            changed = now != self._before or now[0] != self._size
            return messages.Complete(self.number, self._hash.hexdigest(), changed)
        data = os.read(self._fd, min(RESULT_PIECE_BYTES, left))
        if not data:
            raise OSError(errno.EIO, SHORTER)
        self._hash.update(data)
        text = base64.b64encode(data).decode()
        piece = messages.Piece(self.number, self._offset, text)
        self._offset += len(data)
        return piece

    def close(self) -> None:
        os.close(self._fd)


def _stamp(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_size, status.st_mtime_ns


Refusal = tuple[str, str]
"""The path of a file that matches, and why it cannot be sent."""
Batch = list[messages.Result | Refusal]


def _listed(
    number: int, folder: str, batches: Iterator[Batch]
) -> Iterator[messages.ResultsMessage | None]:
    """The answers to a request for a list, and None when other work may be done."""
    count, alive_s = 0, time.monotonic()
    try:
        for batch in batches:
            count += len(batch)
            if count > RESULT_FILES:
                cause = f"over {RESULT_FILES} files in {folder} match the patterns"
                yield messages.Unlisted(number, cause)
                return
            files = tuple(row for row in batch if isinstance(row, messages.Result))
            refused = tuple(row for row in batch if isinstance(row, tuple))
            if batch:
                yield messages.Listed(number, False, folder, files, refused, last=False)
            elif time.monotonic() - alive_s > _ALIVE_S:
                yield messages.Working(number)
            else:
                yield None
                continue
            alive_s = time.monotonic()
    except OSError as error:
        cause = f"{folder} cannot be read: {error.strerror}"
        yield messages.Unlisted(number, cause)
        return
    yield messages.Listed(number, False, folder, (), (), last=True)


def walk(root: bytes, patterns: Sequence[str]) -> Iterator[Batch]:
    """The matching files below ``root``, a few at a time, in order. Raises OSError."""
    folders = [b""]
    while folders:
        below = folders.pop()
        inner: list[bytes] = []
        try:
            with os.scandir(os.path.join(root, below)) as scanned:
                entries = sorted(scanned, key=lambda entry: entry.name)
        except OSError as error:
            if not below:
                raise
            if not isinstance(error, FileNotFoundError):  # otherwise it just vanished
                text = below.decode("utf-8", "surrogateescape")
                yield [(text, f"this folder cannot be read: {error.strerror}")]
            continue
        for begin in range(0, len(entries), _BATCH):
            batch: Batch = []
            for entry in entries[begin : begin + _BATCH]:
                path = os.path.join(below, entry.name)
                text = path.decode("utf-8", "surrogateescape")
                if is_excluded(text, (*NEVER, BY_HOST)):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if not os.path.exists(os.path.join(entry.path, raw(ENVIRONMENT))):
                        inner.append(path)
                elif is_wanted(text, patterns):
                    batch += _row(root, text)
            yield batch
        folders += reversed(inner)


def _row(root: bytes, path: str) -> Batch:
    """The file, or why it cannot be sent; nothing if it has just vanished."""
    try:
        fd = _open_below(root, path)
    except FileNotFoundError:
        if not os.path.islink(os.path.join(root, raw(path))):
            return []
        return [(path, "it is a link to nothing")]
    except OSError as error:
        return [(path, error.strerror or str(error))]
    try:
        status = os.fstat(fd)
    finally:
        os.close(fd)
    mode = stat.S_IMODE(status.st_mode)
    return [messages.Result(path, status.st_size, status.st_mtime_ns, mode)]


def _open_below(root: bytes, path: str) -> int:
    """Open a regular file below ``root``, whose own links are resolved. Raises OSError.

    Folders are opened without following links that are made in the meantime.
    """
    real = os.path.realpath(os.path.join(root, raw(path)))
    if not real.startswith(root.rstrip(b"/") + b"/"):
        raise OSError(errno.EXDEV, OUTSIDE)
    *folders, name = real[len(root.rstrip(b"/")) + 1 :].split(b"/")
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            inner = os.open(folder, flags, dir_fd=at)
            os.close(at)
            at = inner
        if not stat.S_ISREG(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
            raise OSError(errno.EINVAL, NO_FILE)
        # If it has become a pipe since, this must not wait for the pipe's other end.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.open(name, flags, dir_fd=at)
    finally:
        os.close(at)
