"""The folder for copies and recordings; no verify leaves one behind for long.

A verify locks its folder. Its launchers inherit the lock, so it is held while any of
them works there. If a verify is killed, its launcher, which ends with it, removes what
is left, or else the next verify does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

from tfcluster.errors import ResourceError
from tfcluster.record.files import open_private

PREFIX = "tfcluster-verify-"
"""The prefix of these folders' names; these folders are never copied."""
_LOCK = "lock"


class Scratch:
    """A new folder below the temporary folder, locked until it is removed."""

    def __init__(self) -> None:
        """Create the folder. Raises ResourceError if that fails."""
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
            new = self.folder / f".{_LOCK}.new"
            self._lock = open_private(new, os.O_RDWR)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Renamed only now: an unlocked lock file belongs to a dead verify.
            new.rename(self.folder / _LOCK)
        except OSError as error:
            raise ResourceError(
                f"cannot create a folder in {tempfile.gettempdir()}: {error.strerror}",
                hint="TMPDIR names another place",
            ) from error

    def remove(self) -> None:
        """Remove the folder. The next verify removes what cannot be removed now."""
        _remove(self.folder)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def remove_abandoned() -> None:
    """Remove the folders of our user's dead verifies."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if _is_ours(folder):
                _remove_if_abandoned(folder)


def _is_ours(folder: Path) -> bool:
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _remove_if_abandoned(folder: Path) -> None:
    # Do not create it: a verify that has just begun has no lock file yet.
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(folder)
    finally:
        os.close(lock)


def _remove(folder: Path) -> None:
    """Remove the lock file last: without it, nobody would try again."""
    with contextlib.suppress(OSError):
        for one in folder.iterdir():
            if one.is_dir() and not one.is_symlink():
                shutil.rmtree(one, ignore_errors=True)
            elif one.name != _LOCK:
                one.unlink()
        if [one.name for one in folder.iterdir()] == [_LOCK]:
            shutil.rmtree(folder, ignore_errors=True)
