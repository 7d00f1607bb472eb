"""Where a result from a host goes in the workdir here, and what it may replace.

What hosts send is not trusted: no name leads out of the workdir, not even by a link.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from tfcluster.agent.file_names import BY_HOST, local_path, raw
from tfcluster.console.text import byte_size
from tfcluster.protocol.messages import Result

if TYPE_CHECKING:
    import hashlib

_PARTIAL = ".tfcluster-part-"
_SAFE_MODE = 0o755
"""Other users never get the right to write to files that come from a host."""
_KEPT_FREE = 100
"""This fraction (1/N) of the disk stays free, for the run's record among others."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._:@-]")


def new_hash(data: bytes = b"") -> hashlib._Hash:
    """A SHA-256 hash, imported on use: few launches fetch results."""
    import hashlib

    return hashlib.sha256(data)


class PlacementError(Exception):
    """A result cannot be put into place; the message says why."""


def host_folder(host: str) -> str:
    return f"{BY_HOST}/{_UNSAFE.sub('_', host).lstrip('.') or '_'}"


class ResultFolder:
    def __init__(
        self, root: Path, host: str, *, force: bool = False, apart: bool = False
    ) -> None:
        """With ``apart``, all files go to a separate folder for this host."""
        self._root = Path(os.path.realpath(root))
        self._host = host
        self._force = force
        self._below = f"{host_folder(host)}/" if apart else ""

    def has(self, remote: Result) -> bool:
        """Whether the file is here, by its size and time. Raises PlacementError."""
        local = self._status(remote)
        there = (remote.size, remote.mtime_ns)
        return (
            local is not None
            and stat.S_ISREG(local.st_mode)
            and (local.st_size, local.st_mtime_ns) == there
        )

    def objection(self, remote: Result) -> str | None:
        """Why the file here has to stay, or None. Raises PlacementError."""
        local = self._status(remote)
        if local is None:
            return None
        if not stat.S_ISREG(local.st_mode):
            raise PlacementError("what is here is not a regular file")
        if local.st_mtime_ns > remote.mtime_ns and not self._force:
            return "the one here is newer"
        return None

    def path(self, remote: Result) -> str:
        return self._below + remote.path

    def partial(self, remote: Result) -> PartialFile:
        path = self.path(remote)
        target = self._root / local_path(path)
        # A file, a dangling link or a link to elsewhere may be where a folder must be.
        real = Path(os.path.realpath(target.parent))
        if real != self._root and self._root not in real.parents:
            raise PlacementError(
                f"{target.parent} is a link that leads out of the working directory"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        digest = new_hash(raw(f"{self._host}\0{path}")).hexdigest()[:24]
        return PartialFile(target.parent / f"{_PARTIAL}{digest}")

    def place(self, partial: PartialFile, remote: Result) -> str | None:
        """Move a file into place, or say why not. Raises PlacementError, OSError."""
        if why := self.objection(remote):
            return why
        mode = stat.S_IMODE(remote.mode) & _SAFE_MODE | 0o600
        os.fchmod(partial.fileno(), mode)
        os.utime(partial.fileno(), ns=(remote.mtime_ns, remote.mtime_ns))
        partial.path.replace(self._root / local_path(self.path(remote)))
        return None

    def _status(self, remote: Result) -> os.stat_result | None:
        try:
            return (self._root / local_path(self.path(remote))).lstat()
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            text = "a file is here where its folder should be"
            raise PlacementError(text) from error
        except OSError as error:
            raise PlacementError(error.strerror or str(error)) from error


class PartialFile:
    """A file that is arriving, under a temporary name in its target's folder.

    The open file is locked, so that two fetches never write to one file. It is removed
    at the end of the context, unless it has been moved into place.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _open_locked(path)
        self.hash = new_hash()

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            # The path may be that of another fetch's file now.
            with contextlib.suppress(FileNotFoundError):
                if self.path.stat().st_ino == os.fstat(self._fd).st_ino:
                    self.path.unlink()
        finally:
            os.close(self._fd)

    def fileno(self) -> int:
        return self._fd

    def begin(self, size: int) -> None:
        """Empty the file, for ``size`` bytes. Raises OSError, PlacementError."""
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self.hash = new_hash()
        disk = os.fstatvfs(self._fd)
        kept = disk.f_blocks * disk.f_frsize // _KEPT_FREE
        free = max(0, disk.f_bavail * disk.f_frsize - kept)
        if size > free:
            raise PlacementError(
                f"it has {byte_size(size)}, and only {byte_size(free)} are free in "
                f"{self.path.parent}"
            )

    def write(self, data: bytes) -> None:
        self.hash.update(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]


def _open_locked(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        fd = os.open(path, flags, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another fetch may have completed and renamed it before we locked it.
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(fd).st_ino:
                    return fd
        except BlockingIOError as error:
            os.close(fd)
            raise PlacementError("another fetch is receiving it now") from error
        except OSError:
            os.close(fd)
            raise
        os.close(fd)
