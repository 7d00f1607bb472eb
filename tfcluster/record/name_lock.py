"""Ensures that only one active run holds a name that a user gave.

Each name has a lock file, which is unlocked when its holder dies and is never removed:
between finding a file unlocked and removing it, another process may lock it, and a
third process would then lock a new file of the same name.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfcluster.errors import ActiveRunError, ResourceError
from tfcluster.light_dataclasses import as_dict, dataclass
from tfcluster.record.files import read_json
from tfcluster.record.liveness import Lock, identity, try_lock
from tfcluster.record.paths import names_dir, valid_name

_PATIENCE_S = 0.5


@dataclass(frozen=True, slots=True)
class NameLock:
    """A name that this process holds until ``release`` or its death."""

    name: str
    lock: Lock

    def release(self) -> None:
        with contextlib.suppress(ResourceError):
            self.lock.write({})
        self.lock.release()


def hold_name(state: Path, name: str, run: str, *, now_s: float) -> NameLock:
    """Hold ``name`` for ``run``. Exactly one of several competing processes succeeds.

    Raises ActiveRunError, which says who holds it, ResourceError, or ValueError for an
    invalid name.
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
        holder = read_json(path)
        if (holder and not _is_gone(holder)) or time.monotonic() > deadline_s:
            raise _taken(name, holder or {})
        lock = try_lock(path, patience_s=0.02)
    lock.write({"run": run, "since": now_s, **as_dict(identity())})
    return NameLock(name, lock)


def _is_gone(holder: Mapping[str, Any]) -> bool:
    """Whether the process that the file names was started since boot and has ended."""
    pid = holder.get("pid")
    if not isinstance(pid, int) or holder.get("boot_id") != identity().boot_id:
        return False
    try:
        return identity(pid).start_time != holder.get("start_time")
    except ProcessLookupError:
        return True


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
