"""Ends a submitted job, from any host that can reach its scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from tfcluster.errors import ContactLostError, ExitCode
from tfcluster.record.continuation import first, successor
from tfcluster.record.load_run import read_run
from tfcluster.record.paths import RunPaths
from tfcluster.record.run_status import RunView
from tfcluster.schedulers import batch_scheduler
from tfcluster.schedulers.base import Ask, JobPhase, SchedulerError
from tfcluster.schedulers.queries import asker
from tfcluster.states import RunState
from tfcluster.submit.job import QueuedJob
from tfcluster.submit.job_input import forget
from tfcluster.submit.job_status import SETTLING_S, ask_state, settle

PATIENCE_S = 90.0
_POLL_S = 0.5


def cancel(job: QueuedJob, ask: Ask, *, now: bool) -> str | None:
    """Have the scheduler end the job, in order unless ``now``.

    Returns the scheduler's message if this failed, otherwise None.
    """
    scheduler = batch_scheduler(job.backend)
    if scheduler is None:
        return None
    kill = (scheduler.kill_argv(job.id),)
    argvs = kill if now else scheduler.cancel_argvs(job.id)
    answers = [ask(argv) for argv in argvs]
    if any(answer.exit_code == 0 for answer in answers):
        return None
    said = " ".join(f"{answers[-1].stderr} {answers[-1].stdout}".split())
    return said or "no answer"


def stop_job(
    job: QueuedJob, *, now: bool, environ: Mapping[str, str], say: Callable[[str], None]
) -> RunView:
    """Cancel a job and wait until its run is over; returns the run's final state.

    Raises ContactLostError if the scheduler does not answer, or the job does not end.
    """
    ask = asker(environ)
    say(f"cancelling job {job.id}")
    cancel(job, ask, now=now)
    deadline = time.monotonic() + PATIENCE_S
    gone_at: float | None = None
    while time.monotonic() < deadline:
        view = read_run(job.paths, now_s=time.time())
        if view.state.final and view.state is not RunState.LOST:
            return view
        if gone_at is None and _is_over(job, ask):
            gone_at = time.monotonic()
        settling_s = 0.0 if view.launcher is None else SETTLING_S
        if gone_at is not None and time.monotonic() - gone_at >= settling_s:
            why = f"job {job.id} was cancelled"
            settle(job.paths, RunState.STOPPED, ExitCode.TERMINATED, why)
        time.sleep(_POLL_S)  # a scheduler must not be asked too often
    raise ContactLostError(
        f"job {job.id} was cancelled but has not ended",
        hint=f"tfcluster stop --now {job.paths.run}",
    )


def cancel_requeued(
    job: QueuedJob, *, environ: Mapping[str, str], say: Callable[[str], None]
) -> RunPaths | None:
    """Cancel a job that waits to continue its run; returns the run if it has begun.

    Raises ContactLostError if the scheduler does not answer, or the job does not end.
    """
    ask = asker(environ)
    deadline = time.monotonic() + PATIENCE_S
    told = False
    while time.monotonic() < deadline:
        after = successor(job.paths)
        if after is not None:
            return after
        phase = _phase(job, ask)
        if phase in (JobPhase.OVER, JobPhase.GONE):
            say(f"job {job.id} will not start again")
            forget(first(job.paths))
            return None
        if phase is JobPhase.PENDING:
            if not told:
                say(f"cancelling job {job.id}, which waits to start again")
            told = True
            cancel(job, ask, now=True)
        time.sleep(_POLL_S)  # a scheduler must not be asked too often
    raise ContactLostError(
        f"job {job.id} waits to start again and could not be cancelled",
        hint=f"tfcluster status {job.paths.run}",
    )


def _is_over(job: QueuedJob, ask: Ask) -> bool:
    return _phase(job, ask) in (JobPhase.OVER, JobPhase.GONE)


def _phase(job: QueuedJob, ask: Ask) -> JobPhase:
    try:
        return ask_state(job, ask).phase
    except SchedulerError as error:
        raise ContactLostError(
            f"the scheduler of job {job.id} does not answer: {error.message}"
        ) from error
