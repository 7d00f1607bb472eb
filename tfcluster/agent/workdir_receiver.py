"""Receives the user's files on hosts without a shared file system: only changed ones.

It remembers what it wrote, so changes made here, at the source and at both differ (a
three-way merge). Files of tasks are never overwritten, and nothing changes before
everything has arrived.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from tfcluster.agent.file_names import check_inside, local_path
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.protocol import messages, requests
from tfcluster.protocol.wire import WireError, loads

_PART_BYTES = 256 << 10
_WINDOW_BYTES = 1 << 20  # of file contents, requested at a time
_STALE_S = 3600.0  # the age at which a killed agent's incomplete files are removed
MEMORY = ".tfcluster-sync.json"
RETURNED = ".tfcluster-returned.json"
"""Results that were returned to the launcher's folder, and count as written there."""
_INCOMING = ".tfcluster-incoming-"
_SHOWN = 5

Digests = Mapping[str, Sequence[str]]
"""Path -> hashes of what we wrote there: one hash, or two after an interruption."""


class SyncError(Exception):
    """The files cannot be received; the message says why."""


@dataclass(frozen=True, slots=True)
class Merge:
    fetch: tuple[str, ...]
    delete: tuple[str, ...]
    conflicts: tuple[str, ...]


def merge(
    wanted: Mapping[str, str],
    written: Digests,
    present: Mapping[str, str | None],
    returned: Digests = MappingProxyType({}),
) -> Merge:
    """Decide from the hashes of files what to do. Pure.

    ``wanted`` has the files at the source, ``written`` those that we wrote, ``present``
    those here now (None: no file), ``returned`` results that went to the source.
    """
    fetch, conflicts = [], []
    for path, digest in wanted.items():
        here, ours = present[path], (*written.get(path, ()), *returned.get(path, ()))
        if here == digest:
            continue
        if here is None or here in ours:
            fetch.append(path)
        elif digest not in ours:
            conflicts.append(path)  # changed on both sides; if only here, it stays
    gone = (path for path in written if path not in wanted)
    delete = tuple(path for path in gone if present[path] in written[path])
    return Merge(tuple(fetch), delete, tuple(conflicts))


class WorkdirReceiver:
    """Receives one folder. ``send`` sends a frame to the launcher."""

    def __init__(self, send: Callable[[messages.Message], None]) -> None:
        self._send = send
        self._request: requests.SyncRequest | None = None
        self._files: list[requests.File] = []
        self._transfer: _Transfer | None = None
        self._over = False

    def listed(self, request: requests.SyncRequest) -> None:
        """Add a part of the list of files; the last part begins the transfer."""
        if self._over:
            return  # the transfer is done, or has failed
        if self._request is None:
            self._request = request
            if same_files(request.inodes):
                self._done(request.original, count=0)
                return
        self._files += request.files
        if request.last:
            folder = self._request.folder
            self._guarded(lambda: self._begin(folder))

    def came(self, part: requests.Part) -> None:
        transfer = self._transfer
        if transfer is None or self._over:
            return

        def keep() -> None:
            transfer.write(part)
            self._ask(transfer)

        self._guarded(keep)

    def close(self) -> None:
        """Remove what was received but not put into place."""
        if self._transfer is not None:
            self._transfer.drop()

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except (SyncError, OSError) as error:
            self._over = True
            self.close()
            where = self._request.folder if self._request else ""
            cause = str(error)
            if isinstance(error, OSError):
                cause = f"{error.filename or where}: {error.strerror}"
            self._send(messages.Unsynced(cause))

    def _begin(self, folder: str) -> None:
        root = local_path(folder).expanduser()
        if not root.is_absolute():
            raise SyncError(
                f"{folder} cannot be expanded: the user has no home folder there"
            )
        wanted = {file.path: file.digest for file in self._files}
        for path in wanted:
            check_inside(path)
        root.mkdir(parents=True, exist_ok=True)
        written = _recall(root)
        present = {path: _digest(root / path) for path in {*wanted, *written}}
        plan = merge(wanted, written, present, _recall(root, RETURNED))
        if plan.conflicts:
            shown = ", ".join(plan.conflicts[:_SHOWN])
            rest = len(plan.conflicts) - _SHOWN
            more = f" and {rest} more" if rest > 0 else ""
            raise SyncError(
                f"changed both on this machine and in {root} on the host: "
                f"{shown}{more} (move them away on the host, or sync to another folder)"
            )
        same = [file for file in self._files if present[file.path] == file.digest]
        self._transfer = _Transfer(root, self._files, plan, written, same)
        self._ask(self._transfer)

    def _ask(self, transfer: _Transfer) -> None:
        if parts := transfer.wanted():
            self._send(messages.Wants(parts))
        elif not transfer.awaited:
            transfer.finish()
            self._done(str(transfer.root), count=transfer.count)

    def _done(self, cwd: str, *, count: int) -> None:
        self._over = True
        self._send(messages.Synced(cwd, count))


class _Transfer:
    """A transfer: requests files in parts, and keeps them apart until all are here."""

    def __init__(
        self,
        root: Path,
        files: Sequence[requests.File],
        plan: Merge,
        written: Digests,
        same: Sequence[requests.File],
    ) -> None:
        self.root = root
        self.count = len(plan.fetch)
        self.awaited: list[tuple[int, int, int]] = []
        """Index, offset and length of requested parts, the next one last."""
        self._same = same
        self._plan = plan
        self._new = {file.path: [file.digest] for file in files}
        self._written = written
        self._folder = _incoming(root) if plan.fetch else None
        paths = set(plan.fetch)
        self._files = {i: file for i, file in enumerate(files) if file.path in paths}
        # Not a list: the launcher determines the sizes.
        self._parts = (
            (index, offset, min(_PART_BYTES, file.size - offset))
            for index, file in self._files.items()
            for offset in range(0, max(file.size, 1), _PART_BYTES)
        )

    def wanted(self) -> tuple[tuple[int, int, int], ...]:
        """The next parts; none while some are awaited, or if there are no more."""
        if self.awaited:
            return ()
        size = 0
        while size < _WINDOW_BYTES and (part := next(self._parts, None)):
            self.awaited.append(part)
            size += max(part[2], _WINDOW_BYTES // 256)
        parts = tuple(self.awaited)
        self.awaited.reverse()
        return parts

    def write(self, part: requests.Part) -> None:
        """Append a part. Raises SyncError or WireError if it is unexpected."""
        asked = self.awaited.pop() if self.awaited else None
        if asked is None or asked[:2] != (part.index, part.offset):
            raise WireError("a part that was not requested")
        name = self._files[part.index].path
        if part.data is None:
            raise SyncError(f"{name} can no longer be read at its source")
        try:
            data = base64.b64decode(part.data, validate=True)
        except ValueError as error:
            raise WireError("a part that is not base64") from error
        if len(data) != asked[2]:
            raise SyncError(f"{name} changed while it was sent")
        with self._arrived(part.index).open("ab") as file:
            file.write(data)

    def _arrived(self, index: int) -> Path:
        assert self._folder is not None  # there is something to take
        return self._folder / str(index)

    def finish(self) -> None:
        """Move all files into place. Raises SyncError or OSError."""
        for index, file in self._files.items():
            arrived = self._arrived(index)
            if _digest(arrived) != file.digest:
                raise SyncError(f"{file.path} changed while it was sent")
            arrived.chmod(file.mode & 0o777)
            os.utime(arrived, ns=(file.mtime_ns, file.mtime_ns))
        if self.count or self._plan.delete or self._new != self._written:
            self._put()
        for file in self._same:
            # With the time of the source, a file is no result that should go there.
            with suppress(OSError):
                times = (file.mtime_ns, file.mtime_ns)
                os.utime(self.root / file.path, ns=times, follow_symlinks=False)
        self.drop()

    def _put(self) -> None:
        # If we are interrupted, both our old and our new content count as ours.
        old, new = self._written, self._new
        both = {p: [*old.get(p, ()), *new.get(p, ())] for p in {*new, *old}}
        _remember(self.root, both)
        for index, file in self._files.items():
            target = self.root / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            self._arrived(index).replace(target)
        for path in self._plan.delete:
            (self.root / path).unlink(missing_ok=True)
            with suppress(OSError):  # a folder is not empty
                for folder in (self.root / path).relative_to(self.root).parents[:-1]:
                    (self.root / folder).rmdir()
        _remember(self.root, new)

    def drop(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def same_files(inodes: Sequence[tuple[str, int]]) -> bool:
    """Whether these paths are the launcher's own files, on a shared file system."""
    try:
        return bool(inodes) and all(
            local_path(path).stat().st_ino == number for path, number in inodes
        )
    except (OSError, ValueError):
        return False


def sha256(path: Path) -> str:
    """SHA-256 of a file's contents, in hex. Raises OSError."""
    with path.open("rb") as file:
        hashed = hashlib.sha256()
        while data := file.read(1 << 20):
            hashed.update(data)
        return hashed.hexdigest()


def _digest(path: Path) -> str | None:
    """SHA-256 in hex; None if there is nothing, "" if it is not a readable file."""
    try:
        return sha256(path)
    except (FileNotFoundError, NotADirectoryError):
        return "" if path.is_symlink() else None
    except OSError:
        return ""


def _incoming(root: Path) -> Path:
    """A new folder for arriving files; removes old ones that dead agents left."""
    for stale in root.glob(f"{_INCOMING}*"):
        with suppress(OSError):
            if time.time() - stale.stat().st_mtime > _STALE_S:
                shutil.rmtree(stale, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=_INCOMING, dir=root))


def remember_returned(root: Path, digests: Mapping[str, str]) -> None:
    """Note what the launcher's folder has, if ``root`` is its copy. Raises OSError."""
    if digests and (root / MEMORY).is_file():
        returned = dict(_recall(root, RETURNED))
        for path, digest in digests.items():
            # Keep two: the launcher's folder may still have the previous content.
            older = [d for d in returned.get(path, ()) if d != digest]
            returned[path] = [*older[-1:], digest]
        _remember(root, returned, RETURNED)


def _recall(root: Path, name: str = MEMORY) -> Digests:
    try:
        content = loads((root / name).read_bytes())
        for path, digests in content.items():
            check_inside(path)
            if not all(isinstance(digest, str) for digest in digests):
                return {}
    except (OSError, ValueError, TypeError, AttributeError, WireError):
        return {}  # there is none, or somebody has changed it
    return dict(content)


def _remember(root: Path, digests: Digests, name: str = MEMORY) -> None:
    fresh = root / f"{name}.{os.getpid()}"
    fresh.write_text(json.dumps(digests))
    fresh.replace(root / name)
