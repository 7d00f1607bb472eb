"""What the launcher does once a run is over: requeues the job, runs ``on_end``.

The intent to requeue is recorded before the scheduler is asked: the scheduler may kill
the launcher before it answers. The command of ``on_end`` gets the outcome as JSON on
its standard input. We add no arguments and use no shell. Whatever the command does
causes a warning at most.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from tfcluster.base.errors import ExitCode
from tfcluster.base.states import RunState
from tfcluster.console.output import say
from tfcluster.console.sanitise import sanitise
from tfcluster.console.text import times
from tfcluster.lifecycle.actions import Finish
from tfcluster.lifecycle.events import Interrupted
from tfcluster.plan.model import Description, Restart
from tfcluster.record.continuation import Earlier
from tfcluster.record.files import open_private, replace_json
from tfcluster.record.logs import last_lines
from tfcluster.record.paths import RunPaths
from tfcluster.record.run_status import RunView
from tfcluster.schedulers.base import Requeuing

LIMIT_S = 60.0
"""How long the command may take."""
_TERM_S = 2.0
"""How long the command may take to end after SIGTERM."""
_POLL_S = 0.1


def run_end_command(
    description: Description,
    paths: RunPaths,
    outcome: Mapping[str, Any],
    environ: Mapping[str, str],
    *,
    is_interrupted: Callable[[], bool],
    limit_s: float = LIMIT_S,
) -> str | None:
    """Run the Description's ``on_end``; returns why it failed, or None.

    It is ended after ``limit_s`` or ``is_interrupted()``; its output goes to a file.
    """
    argv = description.on_end
    if not argv:
        return None
    message = {**outcome, "folder": str(paths.root)}
    folder = description.workdir if description.workdir.is_dir() else paths.root
    try:
        with contextlib.ExitStack() as stack:
            log = open_private(paths.end_log, os.O_WRONLY | os.O_APPEND)
            stack.callback(os.close, log)
            # A file, not a pipe: a command that reads nothing must not block us.
            inbox = os.memfd_create("outcome")
            stack.callback(os.close, inbox)
            with os.fdopen(os.dup(inbox), "wb") as file:
                file.write(json.dumps(message, default=str).encode() + b"\n")
            os.lseek(inbox, 0, os.SEEK_SET)
            process = subprocess.Popen(
                argv,
                stdin=inbox,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=dict(environ),
                start_new_session=True,
            )
    except OSError as error:
        return f"{argv[0]} cannot be run: {error.strerror}"
    code = _wait(process, limit_s, is_interrupted)
    if code is None:
        why = f"it took longer than {limit_s:g} s"
        return f"{why} and was ended" if not is_interrupted() else "it was interrupted"
    if code == 0:
        return None
    how = f"exit code {code}" if code > 0 else f"signal {-code}"
    return f"{how}{_last_words(paths.end_log)}"


def _wait(
    process: subprocess.Popen[bytes], limit_s: float, is_interrupted: Callable[[], bool]
) -> int | None:
    until = time.monotonic() + limit_s
    while time.monotonic() < until and not is_interrupted():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(_POLL_S)
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TERM_S)
    return None


def _last_words(log: Path) -> str:
    try:
        lines = [line for line in last_lines(log, 5) if line.strip()]
    except OSError:
        return ""
    return f": {lines[-1].strip()[:300]} (see {log})" if lines else ""


_BY_A_PERSON = (ExitCode.INTERRUPTED, ExitCode.HANGUP)

Record = Callable[[Mapping[str, Any]], None]
"""Write an event ``requeued`` with these keys, durably."""


def is_due(restart: Restart, finish: Finish, signals: Collection[Interrupted]) -> bool:
    """Whether only the time limit ended the run, and the run is to continue."""
    told = any(signal.exit_code in _BY_A_PERSON for signal in signals)
    limit = finish.exit_code == ExitCode.TIME_LIMIT
    return restart.requeues and limit and finish.state is RunState.STOPPED and not told


def requeue(
    description: Description,
    backend: Requeuing,
    environ: Mapping[str, str],
    paths: RunPaths,
    before: Earlier,
    record: Record,
) -> str:
    """Ask the scheduler if ``restart.max`` permits it; returns a sentence about it."""
    restart, now_s = description.restart, time.time()
    counted = before.counted(now_s, restart.within_s)
    job = backend.job(environ)
    ended = f"the time limit of job {job} ended this run"
    if len(counted) >= restart.max:
        used = f"all {restart.max} restarts are used (restart.max)"
        return f"{ended}; it was not requeued: {used}"
    _remember(paths, job, description, now_s)
    count = before.requeues + 1
    record({"job": job, "count": count, "restarts": [*counted, now_s]})
    if refused := backend.requeue(environ):
        record({"job": job, "refused": refused})
        return f"{ended}; it was not requeued: {refused}"
    which = f"restart {len(counted) + 1} of {restart.max}"
    return f"{ended}; requeued after the time limit ({times(count)}; {which})"


def _remember(
    paths: RunPaths, job: str, description: Description, now_s: float
) -> None:
    fields = {"job": job, "backend": description.backend, "name": description.name}
    with contextlib.suppress(OSError):
        if not paths.job.exists():
            replace_json(paths.job, {**fields, "submitted": now_s})


def call_on_end(
    description: Description,
    paths: RunPaths,
    view: RunView,
    environ: Mapping[str, str],
    is_interrupted: Callable[[], bool] = lambda: False,
) -> None:
    """Run the command for the end of a run; ``view`` says how the run ended."""
    trouble = run_end_command(
        description, paths, view.to_json(), environ, is_interrupted=is_interrupted
    )
    if trouble is not None:
        say(sanitise(f"warning: on_end: {trouble}"))
