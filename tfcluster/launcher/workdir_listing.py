"""The workdir's files, for hosts that do not share them: a list, and their contents.

Hosts may ask only for parts of the files that are listed here.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tfcluster.agent.file_names import BY_HOST, ENVIRONMENT, NEVER, is_excluded
from tfcluster.base.errors import StartError
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.plan.model import Sync
from tfcluster.protocol import requests
from tfcluster.protocol.frames import ProtocolError
from tfcluster.protocol.messages import Synced, Wants
from tfcluster.protocol.requests import File, Part, Request

MAX_BYTES = 256 << 20
MAX_FILES = 10_000
MAX_PART_BYTES = 1 << 19
_ROWS = 2_000
"""The limit per frame: paths have at most 4096 bytes, and are mostly far shorter."""
_ROW_BYTES = 1 << 19
_WITNESSES = 4


@dataclass(frozen=True, slots=True)
class Listing:
    root: Path
    folder: str
    """The destination on each host."""
    entries: tuple[File, ...]
    inodes: tuple[tuple[str, int], ...]
    """Inodes of some paths: a host that sees the same inodes shares our file system."""

    def sync_requests(self) -> Iterator[requests.SyncRequest]:
        rows: list[File] = []
        size = 0
        for entry in self.entries:
            rows.append(entry)
            size += 6 * len(entry.path) + 128
            if len(rows) >= _ROWS or size > _ROW_BYTES:
                yield self._request(rows, last=False)
                rows, size = [], 0
        yield self._request(rows, last=True)

    def _request(self, rows: Sequence[File], *, last: bool) -> requests.SyncRequest:
        return requests.SyncRequest(
            folder=self.folder,
            original=str(self.root),
            inodes=self.inodes,
            files=tuple(rows),
            last=last,
        )

    def part(self, index: int, offset: int, length: int) -> Part:
        """A part, without data if unreadable. Raises IndexError, OverflowError."""
        if length > MAX_PART_BYTES:
            raise IndexError(index)
        path = self.root / self.entries[index].path
        try:
            with path.open("rb") as file:
                file.seek(offset)
                data = base64.b64encode(file.read(length)).decode()
        except OSError:
            return Part(index, offset, None)
        return Part(index, offset, data)


def listing(root: Path, sync: Sync) -> Listing:
    """List a folder's files, following links to files. Raises StartError."""
    try:
        return _listing(root, sync)
    except OSError as error:
        raise StartError(
            f"{error.filename} cannot be read: {error.strerror}"
        ) from error


def _listing(root: Path, sync: Sync) -> Listing:
    # Imported here: few launches copy files.
    from tfcluster.agent.workdir_receiver import sha256

    files: list[tuple[str, os.stat_result]] = []
    for path in _files(root, (*NEVER, BY_HOST, *sync.exclude)):
        files.append((path, (root / path).stat()))
        if len(files) > MAX_FILES:
            raise StartError(f"there are over {MAX_FILES} files in {root}", hint=_HINT)
    size = sum(status.st_size for _, status in files)
    if size > MAX_BYTES:
        largest = sorted(files, key=lambda pair: -pair[1].st_size)[:3]
        named = ", ".join(f"{p} ({s.st_size >> 20} MiB)" for p, s in largest)
        message = f"{root} holds {size >> 20} MiB: {named}; at most {MAX_BYTES >> 20}"
        raise StartError(f"{message} MiB are copied", hint=_HINT)
    entries = tuple(
        File(
            path,
            status.st_size,
            status.st_mtime_ns,
            status.st_mode & 0o777,
            sha256(root / path),
        )
        for path, status in sorted(files)
    )
    inodes = _inodes(root, [entry.path for entry in entries[:_WITNESSES]])
    return Listing(root, sync.folder, entries, inodes)


def witnesses(root: Path) -> tuple[tuple[str, int], ...]:
    """Inodes of a folder and of its oldest files, which tasks do not replace."""
    try:
        with os.scandir(root) as entries:
            files = [file for file in entries if file.is_file(follow_symlinks=False)]
            oldest = sorted(files, key=lambda file: file.stat().st_mtime_ns)
        return _inodes(root, [file.name for file in oldest[:_WITNESSES]])
    except OSError:
        return ()


def _inodes(root: Path, paths: Sequence[str]) -> tuple[tuple[str, int], ...]:
    some = [root, *(root / path for path in paths)]
    return tuple((str(path), path.stat().st_ino) for path in some)


_HINT = "list what tasks do not need under 'workdir: exclude'"


def _files(root: Path, patterns: Sequence[str]) -> Iterator[str]:
    def failed(error: OSError) -> None:
        raise error

    for folder, folders, names in os.walk(root, onerror=failed):
        below = Path(folder).relative_to(root)
        folders[:] = sorted(
            name
            for name in folders
            if not is_excluded(str(below / name), patterns)
            and not Path(folder, name, ENVIRONMENT).exists()
        )
        for name in sorted(names):
            path = str(below / name)
            if (root / path).is_file() and not is_excluded(path, patterns):
                yield path


class WorkdirSender:
    """Copies ``files``, if any, to hosts; ``send`` sends a request to a host."""

    def __init__(
        self, files: Listing | None, send: Callable[[str, Request], None]
    ) -> None:
        self._files = files
        self._send = send
        self._cwd: dict[str, str] = {}

    def begin(self, host: str) -> None:
        if self._files is not None:
            for request in self._files.sync_requests():
                self._send(host, request)

    def wants(self, host: str, wanted: Wants) -> None:
        """Send the parts that a host asks for. Raises ProtocolError for others."""
        if self._files is None:
            raise ProtocolError("no files are to be copied")
        try:
            for index, offset, length in wanted.parts:
                self._send(host, self._files.part(index, offset, length))
        except (IndexError, OverflowError) as error:
            raise ProtocolError(f"these parts do not exist: {wanted.parts}") from error

    def synced(self, host: str, synced: Synced) -> None:
        self._cwd[host] = synced.cwd

    def cwd(self, host: str, planned: str) -> str:
        """The working directory on a host: ``planned``, unless the host has copies."""
        return self._cwd.get(host, planned)

    def has_copy(self, host: str) -> bool | None:
        """Whether a host works on a copy of the files; None: nothing was copied."""
        if self._files is None or host not in self._cwd:
            return None
        return self._cwd[host] != str(self._files.root)

    def copies(self) -> dict[str, list[str]]:
        copies: dict[str, list[str]] = {}
        for host, cwd in self._cwd.items():
            if self.has_copy(host):
                copies.setdefault(cwd, []).append(host)
        return copies
