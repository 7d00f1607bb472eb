"""The state of a submitted run, and how a submitted job is ended.

The scheduler is asked only where the record says nothing: before the launcher starts in
the job, and after the job was killed.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Mapping

from tfcluster.base.errors import ContactLostError, ExitCode, ResourceError
from tfcluster.base.light_dataclasses import as_dict, replace
from tfcluster.base.states import RunState, TaskState
from tfcluster.console.text import duration
from tfcluster.record.continuation import first, successor, was_requeued
from tfcluster.record.events import Writer, read_events
from tfcluster.record.files import read_json, replace_json
from tfcluster.record.liveness import identity
from tfcluster.record.load_run import read_run
from tfcluster.record.logs import last_lines
from tfcluster.record.paths import RunPaths
from tfcluster.record.replay import replay
from tfcluster.record.run_status import RunView
from tfcluster.schedulers.base import (
    Ask,
    JobPhase,
    JobState,
    SchedulerError,
    asker,
    one_line,
)
from tfcluster.submit.job import INPUT, QueuedJob, find_job, forget_secrets

ASK_S = 10.0
SETTLING_S = 20.0
"""How long a job's last events may take to appear in a shared folder."""
_TAIL_LINES = 15


def with_job_state(
    view: RunView, paths: RunPaths, environ: Mapping[str, str]
) -> RunView:
    """``view``, with the scheduler's answer if the record does not show the state."""
    if not (view.only_a_scheduler_knows or view.awaits_another_start):
        return view
    job = find_job(paths)
    if job is None:
        return view
    state = ask_state(job, asker(environ, ASK_S))
    if view.awaits_another_start:
        if not state.phase.ended:
            return replace(view, reason=f"{view.reason}; {sentence(job, state)}")
        after = successor(job.paths)
        if after is not None:
            return replace(view, continued_as=after.run)
        why = f"{sentence(job, state)} before it started again"
        return replace(view, requeued=False, reason=f"{view.reason}; {why}")
    if not state.phase.ended:
        return replace(view, reason=sentence(job, state))
    again = read_run(paths, now_s=time.time())
    return again if again.state.final else _lost(again, job, state)


def may_start_again(paths: RunPaths, environ: Mapping[str, str]) -> str | None:
    """One sentence if the scheduler may start the run's job again; otherwise None.

    A job that was preempted, or whose node was lost, waits in the queue again, and will
    need the files of its first run.
    """
    job = find_job(paths)
    needed = (paths.root / INPUT).exists()
    needed |= was_requeued(paths) and successor(paths) is None
    if job is None or not needed:
        return None
    state = ask_state(job, asker(environ, ASK_S))
    return None if state.phase.ended else sentence(job, state)


def ask_state(job: QueuedJob, ask: Ask) -> JobState:
    """The job's state from the scheduler; its phase is UNKNOWN without an answer."""
    try:
        return job.scheduler.state(job.id, ask)
    except SchedulerError as error:
        return JobState(JobPhase.UNKNOWN, "unknown", error.message)


def sentence(job: QueuedJob, state: JobState, *, since_s: float | None = None) -> str:
    """``job 12 is pending for 20 s: Resources: waits until ...``."""
    if state.phase is JobPhase.UNKNOWN:
        return f"job {job.id}: the scheduler does not answer ({state.reason})"
    if state.phase.ended:
        how = "is gone" if state.phase is JobPhase.GONE else f"ended as {state.word}"
        return f"job {job.id} {how}" + (f" ({state.reason})" if state.reason else "")
    reason = f": {state.reason}" if state.reason else ""
    how_long = "" if since_s is None else f" for {duration(since_s)}"
    # ``PENDING`` in lower case, but not ``Eqw``.
    word = state.word.lower() if state.word.isupper() else state.word
    return f"job {job.id} is {word}{how_long}{reason}"


def ended(job: QueuedJob, state: JobState) -> str:
    """One sentence that says why the record has no end."""
    return f"{sentence(job, state)} before the launcher recorded how the run ended"


def still_there(job: QueuedJob) -> str:
    """One sentence about a lost run whose job is not over, and how to end the job."""
    ends = shlex.join(job.scheduler.kill_argv(job.id))
    return (
        f"job {job.id} is still running according to {job.scheduler.title}; `{ends}` "
        "ends it"
    )


def _lost(view: RunView, job: QueuedJob, state: JobState) -> RunView:
    return replace(
        view,
        state=RunState.LOST,
        reason=ended(job, state),
        exit_code=int(ExitCode.CONTACT_LOST),
        unknown_since_s=None,
        tasks=tuple(
            task if task.state.final else replace(task, state=TaskState.LOST)
            for task in view.tasks
        ),
    )


def settle(paths: RunPaths, state: RunState, code: ExitCode, reason: str) -> None:
    """Write the end and the report of a run whose launcher will never write them."""
    job = read_json(paths.job) or {}
    with contextlib.suppress(ResourceError, OSError):
        writer = Writer(paths)
        if not paths.events.stat().st_size:
            writer.append(
                {
                    "type": "run",
                    "run": paths.run,
                    "name": job.get("name") or paths.name,
                    "backend": job.get("backend"),
                    "started": job.get("submitted"),
                    **as_dict(identity()),
                }
            )
        if state is RunState.FAILED:
            failure = {"type": "failure", "cause": reason, "log_tail": log_tail(paths)}
            writer.append({**failure, "log": str(paths.launcher_log)})
        is_lost, plan = state is RunState.LOST, read_json(paths.plan) or {}
        for task in replay(plan, read_events(paths.events)).tasks:
            if not task.state.final:
                its = {"task": task.task, "attempt": task.attempt}
                word = TaskState.LOST if is_lost else TaskState.STOPPED
                writer.append({"type": "task", **its, "state": str(word)})
        end = {"type": "end", "state": str(state), "exit_code": int(code)}
        writer.append({**end, "reason": reason})
        writer.close(ASK_S)
        replace_json(paths.report, read_run(paths, now_s=time.time()).to_json())


def log_tail(paths: RunPaths) -> list[str]:
    """The last lines of the launcher's output, or of the scheduler's."""
    try:
        return last_lines(paths.launcher_log, _TAIL_LINES)
    except OSError:
        return []


PATIENCE_S = 90.0
_POLL_S = 0.5


def cancel(job: QueuedJob, ask: Ask, *, now: bool) -> str | None:
    """Have the scheduler end the job; returns why this failed, or None."""
    kill = (job.scheduler.kill_argv(job.id),)
    argvs = kill if now else job.scheduler.cancel_argvs(job.id)
    answers = [ask(argv) for argv in argvs]
    if any(answer.exit_code == 0 for answer in answers):
        return None
    return one_line(answers[-1]) or "no answer"


def stop_job(
    job: QueuedJob, *, now: bool, environ: Mapping[str, str], say: Callable[[str], None]
) -> RunView:
    """Cancel a job, wait; returns the run's final state. Raises ContactLostError."""
    ask = asker(environ)
    say(f"cancelling job {job.id}")
    cancel(job, ask, now=now)
    deadline = time.monotonic() + PATIENCE_S
    gone_at: float | None = None
    while time.monotonic() < deadline:
        view = read_run(job.paths, now_s=time.time())
        if view.state.final and view.state is not RunState.LOST:
            return view
        if gone_at is None and _phase(job, ask).ended:
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
    """Cancel a waiting job; returns a run that has begun. Raises ContactLostError."""
    ask = asker(environ)
    deadline = time.monotonic() + PATIENCE_S
    cancelled = False
    while time.monotonic() < deadline:
        after = successor(job.paths)
        if after is not None:
            return after
        phase = _phase(job, ask)
        if phase.ended:
            say(f"job {job.id} will not start again")
            forget_secrets(first(job.paths))
            return None
        if phase is JobPhase.PENDING:
            if not cancelled:
                say(f"cancelling job {job.id}, which waits to start again")
            cancelled = True
            cancel(job, ask, now=True)
        time.sleep(_POLL_S)  # a scheduler must not be asked too often
    raise ContactLostError(
        f"job {job.id} waits to start again and could not be cancelled",
        hint=f"tfcluster status {job.paths.run}",
    )


def _phase(job: QueuedJob, ask: Ask) -> JobPhase:
    state = ask_state(job, ask)
    if state.phase is JobPhase.UNKNOWN:
        raise ContactLostError(sentence(job, state))
    return state.phase
