"""``stop``: end a run from another shell, and leave nothing behind.

The launcher does the stopping; it is told so by a signal. What a dead launcher left is
swept by way of a fresh agent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from tfcluster import backends
from tfcluster.backends.base import Remembering, Starter
from tfcluster.backends.local import LocalBackend
from tfcluster.errors import ContactLostError
from tfcluster.hostlist import fold
from tfcluster.launcher.sweeping import sweep, sweep_all
from tfcluster.model import Host
from tfcluster.record.files import open_private, read_json
from tfcluster.record.liveness import identity
from tfcluster.record.paths import RunPaths, find, state_dir
from tfcluster.record.reading import read_run
from tfcluster.record.view import LauncherView, RunView
from tfcluster.states import RunState
from tfcluster.submit.job import find_job
from tfcluster.submit.stopping import stop_job

_POLL_S = 0.05
_PATIENCE_S = 60.0
"""Beyond the run's own grace period, of which this module knows nothing."""

Say = Callable[[str], None]


def stop(
    run: str | None, *, now: bool, environ: Mapping[str, str], say: Say
) -> RunView:
    """Stop a run and wait until it is over; how it stands then.

    ``now`` kills at once. Raises ContactLostError where it cannot be told to stop, or
    does not.
    """
    paths = find(state_dir(environ), run)
    view = _read(paths)
    if view.state is RunState.LOST:
        _sweep(view, paths, environ, say)
        return view
    if view.state.final:
        say(f"{view.run} is over already ({view.state})")
        return view
    if (job := find_job(paths)) and _is_elsewhere(view):
        return stop_job(job, now=now, environ=environ, say=say)
    launcher = _within_reach(view)
    if _first_to_ask(paths) and view.state is not RunState.STOPPING:
        _signal(launcher)
        view = _await(paths, lambda v: v.state is RunState.STOPPING)
    if now and not view.state.final:
        _signal(launcher)
    return _await(paths, lambda _: False)


def _read(paths: RunPaths) -> RunView:
    return read_run(paths, now_s=time.time())


def _await(paths: RunPaths, reached: Callable[[RunView], bool]) -> RunView:
    """Until the run is over, or ``reached``."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        view = _read(paths)
        if view.state.final or reached(view):
            return view
        if time.monotonic() > deadline:
            raise ContactLostError(
                f"{view.run} was told to stop, but is still {view.state}",
                hint=f"tfcluster stop --now {view.run}",
            )
        time.sleep(_POLL_S)


def _first_to_ask(paths: RunPaths) -> bool:
    """Several `stop`s at once are one: a second signal would mean to kill."""
    try:
        os.close(open_private(paths.root / "stop", os.O_WRONLY | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _is_elsewhere(view: RunView) -> bool:
    return view.launcher is None or view.launcher.host != identity().host


def _within_reach(view: RunView) -> LauncherView:
    launcher = view.launcher
    if launcher is None:
        raise ContactLostError(f"{view.run} has only just begun", hint="try again")
    if launcher.host != identity().host:
        raise ContactLostError(
            f"the launcher of {view.run} runs on {launcher.host}",
            hint=f"run `tfcluster stop {view.run}` there",
        )
    return launcher


def _signal(launcher: LauncherView) -> None:
    """SIGTERM to the launcher, and to no other process that may have got its pid."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(launcher.pid)
        try:
            if identity(launcher.pid).start_time == launcher.start_time:
                signal.pidfd_send_signal(handle, signal.SIGTERM)
        finally:
            os.close(handle)


def _sweep(
    view: RunView, paths: RunPaths, environ: Mapping[str, str], say: Say
) -> None:
    say(f"the launcher of {view.run} is gone: {view.reason}")
    backend, known = backends.get(view.backend or "local"), read_json(paths.hosts)
    if isinstance(backend, Remembering) and known is not None:
        used = {task.host for task in view.tasks}
        hosts, starter = backend.return_to(known, environ)
        _sweep_hosts(starter, [h for h in hosts if h.name in used], view.run, say)
        return
    if view.backend != "local":
        say("its agents end everything within their lease; look at the hosts yourself")
        return
    count = sweep(LocalBackend(), Host(name="localhost", address=""), view.run)
    if count is None:
        raise ContactLostError("localhost could not be swept")
    say(f"localhost: {count or 'no'} leftover processes ended")


def _sweep_hosts(starter: Starter, hosts: Sequence[Host], run: str, say: Say) -> None:
    missed = []
    for name, found in sweep_all(starter, hosts, run):
        if isinstance(found, int):
            say(f"{name}: {found or 'no'} leftover processes ended")
        else:
            missed.append(name)
            say(found.message if found is not None else f"{name}: no answer")
    if missed:
        raise ContactLostError(
            f"{fold(missed)} could not be swept",
            hint="an agent that lives ends everything within its lease of 30 s",
        )
