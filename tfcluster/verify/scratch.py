"""The folder for recordings and copies of the program's folder.

A verify and its launchers hold its lock. The launcher of a killed verify removes what
is left, or else the next verify does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tfcluster.agent.file_names import ENVIRONMENT, NEVER, is_excluded
from tfcluster.base.errors import ConfigError, Problem, ResourceError
from tfcluster.record.liveness import try_lock

PREFIX = "tfcluster-verify-"
"""The prefix of these folders' names; these folders are never copied."""
_LOCK = "lock"


class Scratch:
    def __init__(self) -> None:
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
            new = self.folder / f".{_LOCK}.new"
            self._lock = try_lock(new)
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
        if self._lock is not None:
            self._lock.release()


def remove_abandoned() -> None:
    """Remove the folders of our user's dead verifies."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ResourceError):
            status = folder.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            # A verify that has just begun has no lock file yet.
            if (folder / _LOCK).exists() and (lock := try_lock(folder / _LOCK)):
                _remove(folder)
                lock.release()


def _remove(folder: Path) -> None:
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != _LOCK:
                entry.unlink()
        if [entry.name for entry in folder.iterdir()] == [_LOCK]:
            shutil.rmtree(folder, ignore_errors=True)


MOST_BYTES = 2 << 30
MOST_FILES = 50_000


def require_small(folder: Path) -> None:
    """Raise ConfigError if ``folder`` has more than MOST_BYTES or MOST_FILES."""
    total = 0
    for count, file in enumerate(files_below(folder), 1):
        total += file.lstat().st_size
        if total > MOST_BYTES or count > MOST_FILES:
            raise ConfigError(
                [
                    Problem(
                        str(folder),
                        f"is larger than {MOST_BYTES >> 30} GiB or {MOST_FILES:,} "
                        "files, and `verify` runs the program in copies of its folder",
                        "keep the data in another folder, or run the program in its "
                        "own folder: --in-place",
                    )
                ]
            )


def copy_workdir(folder: Path, to: Path) -> None:
    """Copy without environments and caches. Raises ResourceError."""
    try:
        shutil.copytree(folder, to, symlinks=True, ignore=_skipped)
    except shutil.Error as error:
        for source, _, why in error.args[0]:
            # A file that is gone by now was not the program's, which has not begun.
            if os.path.lexists(source):
                raise _not_copied(Path(source), why) from error
    except OSError as error:
        raise _not_copied(folder, str(error.strerror)) from error


def _not_copied(source: Path, why: str) -> ResourceError:
    hint = "--in-place runs the program in its own folder; TMPDIR is for the copies"
    return ResourceError(f"cannot copy {source}: {why}", hint=hint)


def files_below(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        skipped = _skipped(root, [*folders, *files])
        folders[:] = [name for name in folders if name not in skipped]
        for name in files:
            if name not in skipped:
                yield Path(root, name)


def _skipped(root: str, names: list[str]) -> set[str]:
    """Names to leave out: caches, virtual environments, sockets, pipes and devices."""
    return {
        name
        for name in names
        if is_excluded(name, (*NEVER, f"{PREFIX}*")) or _special(Path(root, name))
    }


def _special(path: Path) -> bool:
    if path.is_symlink() or path.is_file():
        return False
    return not path.is_dir() or (path / ENVIRONMENT).exists()
