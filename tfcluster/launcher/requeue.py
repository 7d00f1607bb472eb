"""Has the scheduler restart a job that its time limit has ended.

The intent is recorded before the scheduler is asked: the scheduler may kill the
launcher before it answers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tfcluster.console.text import times
from tfcluster.errors import ExitCode
from tfcluster.launcher.interrupts import Interrupt
from tfcluster.lifecycle.types import Finish
from tfcluster.model import Description, Restart
from tfcluster.record.continuation import Earlier
from tfcluster.record.files import replace_json
from tfcluster.record.paths import RunPaths
from tfcluster.schedulers.base import Requeuing
from tfcluster.states import RunState

_BY_A_PERSON = (ExitCode.INTERRUPTED, ExitCode.HANGUP)

Record = Callable[[Mapping[str, Any]], None]
"""Write an event ``requeued`` with these keys, durably."""


def is_due(restart: Restart, finish: Finish, signals: Collection[Interrupt]) -> bool:
    """Whether only the time limit ended the run, and the run is to continue."""
    told = any(signal.code in _BY_A_PERSON for signal in signals)
    limit = finish.exit_code == ExitCode.TIME_LIMIT
    return restart.requeues and limit and finish.state is RunState.STOPPED and not told


def requeue(
    description: Description,
    backend: Requeuing,
    environ: Mapping[str, str],
    paths: RunPaths,
    known: Earlier,
    record: Record,
) -> str:
    """Ask the scheduler if ``restart.max`` permits it; returns a sentence about it.

    ``known`` has the restarts of this run and of the runs before it.
    """
    restart, now_s = description.restart, time.time()
    counted = known.counted(now_s, restart.within_s)
    job = backend.job(environ)
    ended = f"the time limit of job {job} ended this run"
    if len(counted) >= restart.max:
        used = f"all {restart.max} restarts are used (restart.max)"
        return f"{ended}; it was not requeued: {used}"
    _remember(paths, job, description, now_s)
    count = known.requeues + 1
    record({"job": job, "count": count, "restarts": [*counted, now_s]})
    if refused := backend.requeue(environ):
        record({"job": job, "refused": refused})
        return f"{ended}; it was not requeued: {refused}"
    which = f"restart {len(counted) + 1} of {restart.max}"
    return f"{ended}; requeued after the time limit ({times(count)}; {which})"


def _remember(
    paths: RunPaths, job: str, description: Description, now_s: float
) -> None:
    """Note a job that the user wrote: this job will continue the run."""
    known = {"job": job, "backend": description.backend, "name": description.name}
    with contextlib.suppress(OSError):
        if not paths.job.exists():
            replace_json(paths.job, {**known, "submitted": now_s})
