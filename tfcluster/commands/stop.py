"""``stop``: end a run from another shell, and leave nothing behind.

A signal tells the launcher to stop the run. If the launcher is dead, new agents sweep
what it left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

from tfcluster import schedulers
from tfcluster.base.errors import ContactLostError
from tfcluster.base.states import RunState
from tfcluster.launcher.brief_contacts import sweep_all
from tfcluster.plan.host_patterns import fold
from tfcluster.plan.model import Host
from tfcluster.record.continuation import latest
from tfcluster.record.launched import resized
from tfcluster.record.liveness import identity
from tfcluster.record.load_run import read_run
from tfcluster.record.paths import RunPaths, find, state_dir
from tfcluster.record.run_status import LauncherView, RunView
from tfcluster.schedulers.process_channel import OwnHostStarter
from tfcluster.schedulers.starting import Starter
from tfcluster.submit.job import find_job
from tfcluster.submit.job_status import cancel_requeued, stop_job

_POLL_S = 0.05
_PATIENCE_S = 60.0
"""How long a run may take to end; we do not know its grace period here."""
_NOW_PATIENCE_S = 45.0
"""After this time, a launcher that has not ended is itself killed."""
_HEARD_S = 5.0
"""How long the record may take to show that the launcher received a signal."""

Say = Callable[[str], None]


def stop(
    run: str | None,
    *,
    now: bool,
    environ: Mapping[str, str],
    say: Say,
    patience_s: float | None = None,
) -> RunView:
    """Stop a run (``now``: kill it) and wait; returns its final state.

    Raises ContactLostError if the launcher cannot be reached or does not stop.
    """
    first = find(state_dir(environ), run)
    paths = latest(first)
    if paths != first:
        say(f"{first.run} continues as {paths.run}")
    view = _read(paths)
    if view.awaits_another_start and (job := find_job(paths)):
        after = cancel_requeued(job, environ=environ, say=say)
        if after is None:
            return _read(paths)
        paths, view = after, _read(after)
    if view.state.final and view.state is not RunState.LOST:
        say(f"{view.run} has already ended ({view.state})")
        return view
    view = _stopped(
        view, paths, environ, say, now=now, patience_s=patience_s or _NOW_PATIENCE_S
    )
    say(f"{view.run}: {view.state}")
    return view


def _stopped(
    view: RunView,
    paths: RunPaths,
    environ: Mapping[str, str],
    say: Say,
    *,
    now: bool,
    patience_s: float,
) -> RunView:
    if view.state is RunState.LOST:
        _sweep(view, paths, environ, say)
        return view
    launcher = view.launcher
    here = launcher is not None and launcher.host == identity().host
    if not here and (job := find_job(paths)):
        return stop_job(job, now=now, environ=environ, say=say)
    if launcher is None:
        raise ContactLostError(f"{view.run} is still starting", hint="try again")
    if not here:
        raise ContactLostError(
            f"the launcher of {view.run} runs on {launcher.host}",
            hint=f"run `tfcluster stop {view.run}` there",
        )
    with ExitStack() as stack:
        # Concurrent `stop`s send only one signal: a second one would kill the tasks.
        if _first(paths.events, stack) and view.state is not RunState.STOPPING:
            _signal(launcher)
        if not now:
            return _await_end(paths, _PATIENCE_S)
        view = _await(paths, lambda v: v.state is RunState.STOPPING, _HEARD_S)
        # And a third one would make the launcher exit without cleaning up.
        if not view.state.final and _first(paths.plan, stack):
            # Not SIGTERM again: two of them in a moment count as one.
            _signal(launcher, signal.SIGINT)
        view = _await(paths, lambda _: False, patience_s)
    if view.state.final:
        return view
    say(f"the launcher of {view.run} does not respond: killing it (pid {launcher.pid})")
    _kill(launcher)
    view = _await_end(paths, _HEARD_S)
    if view.state is RunState.LOST:
        _sweep(view, paths, environ, say)
    return view


def _read(paths: RunPaths) -> RunView:
    return read_run(paths, now_s=time.time())


def _await(
    paths: RunPaths, reached: Callable[[RunView], bool], patience_s: float
) -> RunView:
    deadline = time.monotonic() + patience_s
    while True:
        view = _read(paths)
        if view.state.final or reached(view) or time.monotonic() > deadline:
            return view
        time.sleep(_POLL_S)


def _await_end(paths: RunPaths, patience_s: float) -> RunView:
    view = _await(paths, lambda _: False, patience_s)
    if not view.state.final:
        raise ContactLostError(
            f"{view.run} was asked to stop, but is still {view.state}",
            hint=f"tfcluster stop --now {view.run}",
        )
    return view


def _first(file: Path, stack: ExitStack) -> bool:
    """Whether no other live `stop` of this run is waiting, by a lock on a file."""
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)  # on a read-only disk
    stack.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _signal(launcher: LauncherView, number: int = signal.SIGTERM) -> None:
    """Send a signal, and SIGCONT in case the launcher was suspended (Ctrl-Z)."""
    with _handle(launcher) as handle:
        if handle is not None:
            signal.pidfd_send_signal(handle, number)
            signal.pidfd_send_signal(handle, signal.SIGCONT)


@contextlib.contextmanager
def _handle(launcher: LauncherView) -> Iterator[int | None]:
    """A pidfd of the launcher; None if it is gone or its pid was reused."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(launcher.pid)
        try:
            same = identity(launcher.pid).start_time == launcher.start_time
            yield handle if same else None
        finally:
            os.close(handle)
        return
    yield None


def _kill(launcher: LauncherView) -> None:
    """SIGKILL the launcher and its local agents, whose guards then clean up."""
    import psutil  # imported here: few runs need it

    with _handle(launcher) as handle:
        if handle is None:
            return
        with contextlib.suppress(psutil.Error):
            guards = psutil.Process(launcher.pid).children()
            for agent in [agent for guard in guards for agent in guard.children()]:
                agent.kill()
        signal.pidfd_send_signal(handle, signal.SIGKILL)


def _sweep(
    view: RunView, paths: RunPaths, environ: Mapping[str, str], say: Say
) -> None:
    say(f"the launcher of {view.run} is gone: {view.reason}")
    backend = schedulers.get(view.backend) if view.backend else None
    starter: Starter
    if backend is None or backend.here:
        hosts, starter = [Host(name="localhost")], OwnHostStarter()
    elif backend.lists_hosts:
        used, description = {task.host for task in view.tasks}, resized(paths)
        starter = backend.starter(description, environ)
        hosts = [host for host in description.hosts if host.name in used]
    else:
        say(
            "its agents stop everything when their lease ends; check the hosts yourself"
        )
        return
    missed = []
    for name, result in sweep_all(starter, hosts, view.run):
        if isinstance(result, int):
            count = f"{result} leftover processes ended"
            say(f"{name}: {count if result else 'no leftover processes found'}")
        else:
            missed.append(name)
            say(result.message if result is not None else f"{name}: no answer")
    if missed:
        raise ContactLostError(
            f"{fold(missed)} could not be swept",
            hint="a live agent stops everything within its lease of 30 s",
        )
