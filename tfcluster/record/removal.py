"""Removes records of runs that are over, and old crash files.

Never removes anything from a run that has a launcher: it takes the launcher's lock
first.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tfcluster.record.liveness import try_lock
from tfcluster.record.paths import RunPaths

_REMOVED = ".removed"
"""The suffix of folders that are being removed, so that no reader lists them."""


def size_of(folder: Path) -> int:
    """The bytes of all files below ``folder``; does not follow links."""
    size = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(where, name)).st_size  # noqa: PTH118 - many files
            except OSError:
                continue
    return size


def remove_run(paths: RunPaths) -> bool:
    """Remove the record of a run. False if the run has a launcher: nothing is removed.

    Raises OSError, and ResourceError if its lock cannot be taken.
    """
    lock = try_lock(paths.lock)
    if lock is None:
        return False
    try:
        # Rename it first: readers find the whole record or nothing.
        aside = paths.root.with_name(paths.root.name + _REMOVED)
        paths.root.rename(aside)
        shutil.rmtree(aside)
    finally:
        lock.release()
    return True


def remove_rests(state: Path) -> None:
    """Remove what an interrupted removal has left. Raises OSError."""
    for rest in (state / "runs").glob(f"*{_REMOVED}"):
        shutil.rmtree(rest)


def old_crash_files(state: Path, before_s: float) -> Iterator[Path]:
    """The crash files that were written before this Unix time."""
    for path in sorted(state.glob("crash-*.txt")):
        try:
            if path.lstat().st_mtime < before_s:
                yield path
        except OSError:
            continue
