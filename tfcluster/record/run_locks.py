"""What only the holder of a lock may do: use a name for a run, and remove a record."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tfcluster.base.errors import ActiveRunError, ResourceError
from tfcluster.base.light_dataclasses import as_dict
from tfcluster.record.files import read_json
from tfcluster.record.liveness import Lock, exists, identity, try_lock
from tfcluster.record.paths import RunPaths, names_dir, valid_name
from tfcluster.record.replay import launcher_in

_PATIENCE_S = 0.5


def hold_name(state: Path, name: str, run: str, *, now_s: float) -> Lock:
    """Hold ``name`` for ``run``. Exactly one of several competing processes succeeds.

    The lock file is never removed: another process may lock it before it is, and a
    third one would then lock a new file. Raises ActiveRunError, which says who holds
    it, ResourceError, or ValueError for an invalid name.
    """
    if not valid_name(name):
        raise ValueError(f"{name!r} cannot be the name of a run")
    try:
        path = names_dir(state) / f"{name}.lock"
    except OSError as error:
        raise ResourceError(f"cannot use {state}: {error.strerror}") from error
    lock = try_lock(path)
    deadline_s = time.monotonic() + _PATIENCE_S
    while lock is None:
        # A new holder writes itself into the file a moment after locking it. Until
        # then the file may name the previous holder, which died.
        holder = read_json(path) or {}
        process = launcher_in(holder)
        gone = process is not None and exists(process) is False
        if (holder and not gone) or time.monotonic() > deadline_s:
            raise _taken(name, holder)
        lock = try_lock(path, patience_s=0.02)
    lock.write({"run": run, "since": now_s, **as_dict(identity())})
    return lock


def _taken(name: str, holder: Mapping[str, Any]) -> ActiveRunError:
    run, since_s = holder.get("run"), holder.get("since")
    who = f"the run {run}" if isinstance(run, str) else "another run"
    since = ""
    if isinstance(since_s, (int, float)):
        since = time.strftime(" since %H:%M:%S", time.localtime(since_s))
    where = ""
    if holder.get("pid") and holder.get("host"):
        where = f" (pid {holder['pid']} on {holder['host']})"
    return ActiveRunError(
        f"{who} already uses the name '{name}'{since}{where}",
        hint=f"use --name OTHER, or run `tfcluster stop {name}` first",
    )


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
    """Remove a record; False: the run has a launcher. Raises OSError, ResourceError."""
    import shutil  # only to remove something: it takes long to import

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
    import shutil  # as above

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
