"""Finds out whether a run's launcher is still alive, from its lock and its identity.

The lock is flock(2), so it is released when its holder dies, however that happens.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tfcluster.agent import proc
from tfcluster.base.errors import ActiveRunError, ExitCode, ResourceError
from tfcluster.base.light_dataclasses import as_dict, dataclass, replace
from tfcluster.base.states import RunState, TaskState
from tfcluster.record.files import open_private, read_json, write_all
from tfcluster.record.paths import ELSEWHERE, RunPaths
from tfcluster.record.replay import launcher_in
from tfcluster.record.run_status import LauncherView, RunView

SILENCE_S = 30.0
"""After this long without a heartbeat, a launcher on another host may be dead."""

_PROBE_S = 0.5


def identity(pid: int | None = None) -> LauncherView:
    """The identity of this process or of ``pid``. Raises ProcessLookupError."""
    pid = os.getpid() if pid is None else pid
    start_time = _start_time(pid)
    if start_time is None:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), str(pid))
    return LauncherView(
        pid=pid, host=os.uname().nodename, boot_id=proc.boot_id(), start_time=start_time
    )


def _start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of ``pid``; None if it is gone."""
    process = proc.read(pid)
    return None if process is None or process.dead else process.start_time


class Lock:
    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def write(self, content: Mapping[str, object]) -> None:
        """Replace the file's content, which names the holder. Raises ResourceError."""
        try:
            os.ftruncate(self._descriptor, 0)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            write_all(self._descriptor, json.dumps(content).encode() + b"\n")
        except OSError as error:
            raise ResourceError(
                f"cannot write {self.path}: {error.strerror}", hint=ELSEWHERE
            ) from error

    def release(self) -> None:
        """Release the lock, which then names no holder. The file stays."""
        if self._descriptor >= 0:
            with suppress(OSError):
                os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = -1


def try_lock(path: Path, *, patience_s: float = 0.0) -> Lock | None:
    """The lock; None: taken for all of ``patience_s``. Raises ResourceError."""
    deadline_s = time.monotonic() + patience_s
    try:
        descriptor = open_private(path, os.O_RDWR)
    except OSError as error:
        raise ResourceError(f"cannot open {path}: {error.strerror}") from error
    try:
        while not _flock(descriptor, fcntl.LOCK_EX):
            if time.monotonic() >= deadline_s:
                os.close(descriptor)
                return None
            time.sleep(0.01)
    except OSError as error:
        os.close(descriptor)
        raise ResourceError(
            f"cannot lock {path}: {error.strerror}",
            hint="set TFCLUSTER_STATE_DIR to a folder on a file system with locks",
        ) from error
    return Lock(path, descriptor)


def acquire(paths: RunPaths) -> Lock:
    """Hold the run's lock for this process. Raises ActiveRunError if it is taken."""
    # A process that only checks the lock also holds it for a moment.
    lock = try_lock(paths.lock, patience_s=_PROBE_S)
    if lock is None:
        raise ActiveRunError(f"the run {paths.run} already has a launcher")
    lock.write(as_dict(identity()))
    return lock


def holder(paths: RunPaths) -> LauncherView | None:
    """The launcher that the run's lock file names, if it names one."""
    return launcher_in(read_json(paths.lock) or {})


def exists(launcher: LauncherView) -> bool | None:
    """Whether its process exists; None: processes there are not visible from here."""
    here = identity()
    if (launcher.host, launcher.boot_id) != (here.host, here.boot_id):
        return None
    return _start_time(launcher.pid) == launcher.start_time


def _is_held(path: Path) -> bool | None:
    """Whether anybody holds the lock; None if there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return not _flock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)


def _flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """What this host can observe of a launcher."""

    held: bool | None
    """Whether its lock is held; None: there is no lock file."""
    same_boot: bool
    """Whether it was started on this machine since the last boot."""
    same_host: bool
    process: bool | None
    """Whether its process exists; None: processes there are not visible from here."""
    heartbeat_s: float | None
    """Unix time of its last sign of life."""


def signs(paths: RunPaths, launcher: LauncherView | None) -> Signs:
    """Look for signs of the launcher that the record or its lock file names."""
    here = identity()
    try:
        held = _is_held(paths.lock)
    except OSError:
        held = None
    return Signs(
        held=held,
        same_boot=launcher is not None and launcher.boot_id == here.boot_id,
        same_host=launcher is not None and launcher.host == here.host,
        process=None if launcher is None else exists(launcher),
        heartbeat_s=heartbeat_s(paths),
    )


def by_signs(view: RunView, signs: Signs, *, now_s: float) -> RunView:
    """The run as it must be shown, given the signs of its launcher.

    A launcher on another host, whose lock may not be visible here, is never assumed
    dead.
    """
    seen_s = signs.heartbeat_s
    fresh = seen_s is not None and now_s - seen_s <= SILENCE_S
    if view.state.final or (signs.held and signs.process is not False):
        return view
    if view.launcher is None:
        # A moment passes between creating the folder and the first event.
        if fresh and signs.process is not False:
            return view
        return _lost(view, "the launcher died before the run started", seen_s)
    if signs.same_boot:
        return _lost(view, "the launcher died", seen_s)
    if signs.same_host:
        return _lost(view, "interrupted by a reboot", seen_s)
    if fresh:
        return view
    reason = "no sign of life from the launcher; it runs on "
    reason += f"{view.launcher.host}, check there"
    return replace(view, reason=reason, unknown_since_s=seen_s)


def _lost(view: RunView, reason: str, seen_s: float | None) -> RunView:
    return replace(
        view,
        state=RunState.LOST,
        reason=reason,
        exit_code=int(ExitCode.CONTACT_LOST),
        since_s=seen_s,
        ended_s=seen_s,
        tasks=tuple(
            task if task.state.final else replace(task, state=TaskState.LOST)
            for task in view.tasks
        ),
    )


def heartbeat_s(paths: RunPaths) -> float | None:
    """The Unix time at which the record was last written; None: there is no record."""
    times = []
    for path in (paths.progress, paths.events, paths.lock, paths.root):
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times, default=None)
