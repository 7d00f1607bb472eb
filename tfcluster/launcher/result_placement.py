"""Where a result from a host goes in the workdir here, and what it may replace.

The first half decides and is pure; ``ResultFolder`` looks at files and moves them. What
hosts send is not trusted: no name leads out of the workdir, not even through links.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from tfcluster.agent.os_encoding import local_path, raw
from tfcluster.agent.workdir_patterns import BY_HOST
from tfcluster.console.text import byte_size
from tfcluster.light_dataclasses import dataclass, replace
from tfcluster.record.fetched import Copy, FetchedFiles

if TYPE_CHECKING:
    import hashlib

READ_BYTES = 1 << 20
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


@dataclass(frozen=True, slots=True)
class Remote:
    """A file on a host as it was listed; the path is relative to its workdir."""

    path: str
    size: int
    mtime_ns: int
    mode: int


@dataclass(frozen=True, slots=True)
class Local:
    """The file at a path here; times in ns since the epoch."""

    size: int
    mtime_ns: int
    ctime_ns: int
    is_file: bool = True


@dataclass(frozen=True, slots=True)
class Placing:
    """Where a file goes."""

    path: str
    """Relative to the workdir here."""
    current: bool
    """Whether the file there already has the content of the host's file."""
    original: str
    """Where the file would go if nothing were in the way."""
    why: str | None = None
    """Why the file does not go to ``original``."""


def is_current(remote: Remote, local: Local | None, copy: Copy | None) -> bool:
    """Whether the file was fetched before and has not changed on either side since."""
    if copy is None or (remote.size, remote.mtime_ns) != (copy.size, copy.mtime_ns):
        return False
    return local is not None and is_untouched(local, copy)


def is_untouched(local: Local, copy: Copy) -> bool:
    """Whether the copy here is still as it was fetched."""
    here = (local.size, local.mtime_ns)
    return local.is_file and here == (copy.here_size, copy.here_mtime_ns)


def objection(
    remote: Remote, local: Local | None, copy: Copy | None, *, launched_ns: int
) -> str | None:
    """Why ``remote`` must not replace ``local``; None if it may.

    ``launched_ns`` is when the run was launched, by the clock here. In a shared folder,
    the tasks would have replaced a file that has not been changed here since then.
    """
    if local is None or (copy is not None and is_untouched(local, copy)):
        return None
    if not local.is_file:
        return "what is here is not a regular file"
    if local.mtime_ns > remote.mtime_ns:
        return "the one here is newer"
    if copy is not None:
        return "the one here was changed since it was fetched"
    if local.ctime_ns > launched_ns:
        return "the one here was changed since the launch"
    return None


def beside(path: str, host: str) -> str:
    """The path for a host's file if the file here has to stay."""
    folder, slash, name = path.rpartition("/")
    end = f".from-{safe_name(host)}"
    # A name has at most 255 bytes on Linux.
    while len(os.fsencode(name + end)) > 255:
        name = name[:-1]
    return f"{folder}{slash}{name}{end}"


def host_folder(host: str) -> str:
    """The folder for all results of one host, if several are fetched."""
    return f"{BY_HOST}/{safe_name(host)}"


def safe_name(host: str) -> str:
    """The host's name as a valid file name on this machine."""
    return _UNSAFE.sub("_", host).lstrip(".") or "_"


class ResultFolder:
    """The workdir here, for the results of one host."""

    def __init__(
        self,
        root: Path,
        host: str,
        fetched: FetchedFiles,
        *,
        launched_ns: int,
        force: bool = False,
        apart: bool = False,
    ) -> None:
        """With ``apart``, all files go to a separate folder for this host."""
        self._root = Path(os.path.realpath(root))
        self._host = host
        self._fetched = fetched
        self._launched_ns = launched_ns
        self._force = force
        self._below = f"{host_folder(host)}/" if apart else ""

    def choose(self, remote: Remote) -> Placing:
        """Where the file goes now. Raises PlacementError."""
        path = self._below + remote.path
        local, copy = self._look(path), self._fetched.get(path)
        if is_current(remote, local, copy):
            return Placing(path, current=True, original=path)
        why = objection(remote, local, copy, launched_ns=self._launched_ns)
        if why is None or (self._force and local is not None and local.is_file):
            return Placing(path, current=False, original=path)
        aside = beside(path, self._host)
        local, copy = self._look(aside), self._fetched.get(aside)
        if also := objection(remote, local, copy, launched_ns=self._launched_ns):
            raise PlacementError(f"{why}; {aside}: {also}")
        current = is_current(remote, local, copy)
        return Placing(aside, current=current, original=path, why=why)

    def bases(self, choice: Placing, remote: Remote) -> list[Path]:
        """The files here whose content may be the beginning of the host's file."""
        names = dict.fromkeys((choice.original, choice.path))
        found = []
        for name in names:
            local = self._look(name)
            if local is None or not local.is_file or local.size > remote.size:
                continue
            found.append(self._root / local_path(name))
        return found

    def is_original(self, base: Path | None, choice: Placing) -> bool:
        return base == self._root / local_path(choice.original)

    def partial(self, choice: Placing) -> PartialFile:
        """The part of a file that has arrived. Raises PlacementError or OSError."""
        target = self._root / local_path(choice.path)
        # A file, a dangling link or a link to elsewhere may be where a folder must be.
        real = Path(os.path.realpath(target.parent))
        if real != self._root and self._root not in real.parents:
            raise PlacementError(
                f"{target.parent} is a link that leads out of the working directory"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        name = raw(f"{self._host}\0{choice.path}")
        digest = new_hash(name).hexdigest()[:24]
        return PartialFile(target.parent / f"{_PARTIAL}{digest}")

    def keep(self, choice: Placing, remote: Remote, digest: str) -> None:
        """Note that the file here has the content of the host's file."""
        local = self._look(choice.path)
        if local is not None:
            here = (local.size, local.mtime_ns)
            copy = Copy(remote.size, remote.mtime_ns, *here, digest)
            self._fetched.put(choice.path, copy)

    def place(self, partial: PartialFile, choice: Placing, remote: Remote) -> Placing:
        """Move a complete file into place. Raises PlacementError or OSError.

        Returns where the file went: something may have changed here while it was sent.
        """
        now = self.choose(remote)
        if now.path != choice.path:
            choice = replace(now, current=False)
        mode = stat.S_IMODE(remote.mode) & _SAFE_MODE | 0o600
        os.fchmod(partial.fileno(), mode)
        os.utime(partial.fileno(), ns=(remote.mtime_ns, remote.mtime_ns))
        partial.path.replace(self._root / local_path(choice.path))
        return choice

    def _look(self, path: str) -> Local | None:
        try:
            found = (self._root / local_path(path)).lstat()
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            text = "a file is here where its folder should be"
            raise PlacementError(text) from error
        except OSError as error:
            raise PlacementError(error.strerror or str(error)) from error
        is_file = stat.S_ISREG(found.st_mode)
        return Local(found.st_size, found.st_mtime_ns, found.st_ctime_ns, is_file)


class PartialFile:
    """A file that is arriving, under a temporary name in its target's folder.

    The open file is locked, so that two fetches never write to one file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = _open_locked(path)
        self.size = os.fstat(self._fd).st_size
        self.hash = new_hash()

    def __enter__(self) -> PartialFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if os.fstat(self._fd).st_size == 0:
                self._remove_own()
        finally:
            os.close(self._fd)

    def _remove_own(self) -> None:
        """Remove the temporary file, unless it is now the file of another fetch."""
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_ino == os.fstat(self._fd).st_ino:
                self.path.unlink()

    def fileno(self) -> int:
        return self._fd

    def proof(self, tick: Callable[[], None]) -> str:
        """The digest of all that has arrived so far, which ``write`` continues.

        ``tick`` is called now and then, and may raise.
        """
        self.hash = new_hash()
        os.lseek(self._fd, 0, os.SEEK_SET)
        while data := os.read(self._fd, READ_BYTES):
            self.hash.update(data)
            tick()
        return self.hash.hexdigest()

    def check_room(self, size: int) -> None:
        """Raises PlacementError if the disk has no room for a file of ``size`` bytes.

        A host may list any size, and a full disk would also harm the run's record.
        """
        disk = os.fstatvfs(self._fd)
        kept = disk.f_blocks * disk.f_frsize // _KEPT_FREE
        free = max(0, disk.f_bavail * disk.f_frsize - kept)
        if size - os.fstat(self._fd).st_size > free:
            raise PlacementError(
                f"it has {byte_size(size)}, and only {byte_size(free)} are free in "
                f"{self.path.parent}"
            )

    def begin(self, base: Path | None, offset: int) -> None:
        """Continue at ``offset``: the bytes before it are in ``base``, or here if None.

        Raises PlacementError if ``base`` has become shorter, or OSError.
        """
        if base is None and offset and offset == self.size:
            os.lseek(self._fd, 0, os.SEEK_END)
            return
        os.ftruncate(self._fd, 0)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self.hash = new_hash()
        if base is None or not offset:
            return
        with base.open("rb") as file:
            while offset:
                data = file.read(min(READ_BYTES, offset))
                if not data:
                    raise PlacementError("the one here changed in the meantime")
                self.write(data)
                offset -= len(data)

    def write(self, data: bytes) -> None:
        """Append. Raises OSError."""
        self.hash.update(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


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
