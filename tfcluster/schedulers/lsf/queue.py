"""Queues and follows a job with bsub, bjobs and bkill. Pure but for ``ask``."""

from __future__ import annotations

import re
from pathlib import Path

from tfcluster.schedulers.base import (
    Ask,
    CommandAnswer,
    JobPhase,
    JobState,
    SchedulerError,
)

_JOB_ID = re.compile(r"^Job <([0-9]+)> is submitted to ", re.MULTILINE)
_PENDING = ("PEND", "PSUSP", "WAIT", "PROV", "FWD_PEND")
_OVER = ("DONE", "EXIT", "POST_DONE", "POST_ERR")
_HINTS = {
    "No such queue": "`bqueues` lists the queues; lsf: {queue: ...}",
    "Bad resource requirement": "`lsinfo` lists the resources",
    "User cannot use the queue": "`bqueues -l QUEUE` shows who may",
    "Cannot exceed queue's hard limit": "`bqueues -l QUEUE` shows the limits",
    "LSF is down": "`lsid` checks it",
    "Failed in an LSF library call": "`lsid` checks it",
}


def submit(script: Path, ask: Ask) -> str:
    """bsub reads directives only from its standard input."""
    answer = ask(("/bin/sh", "-c", 'exec bsub < "$0"', str(script)))
    match = _JOB_ID.search(answer.stdout)
    if answer.exit_code == 0 and match is not None:
        return match[1]
    said = _own_words(answer)
    hint = next((hint for word, hint in _HINTS.items() if word in said), None)
    raise SchedulerError(f"bsub refused the job: {said or 'no answer'}", hint)


def state(job: str, ask: Ask) -> JobState:
    """bjobs also knows jobs that are over, for an hour by default."""
    found = fields(job, ("stat", "exit_code", "exit_reason", "pend_reason"), ask)
    if found is None:
        return JobState(JobPhase.GONE, "gone")
    word, code, why, waits = found[0] or "", *found[1:4]
    if word in _OVER:
        reason = why or (f"exit status {code}" if code else None)
        return JobState(JobPhase.OVER, word, reason)
    if word == "PSUSP":
        return JobState(JobPhase.PENDING, word, f"`bresume {job}` releases it")
    phase = JobPhase.PENDING if word in _PENDING else JobPhase.RUNNING
    return JobState(phase, word, waits if phase is JobPhase.PENDING else None)


def fields(job: str, names: tuple[str, ...], ask: Ask) -> list[str | None] | None:
    """These fields of a job, each None if LSF has ``-`` for it; None: no such job.

    Raises SchedulerError if there is no usable answer.
    """
    wanted = f"{' '.join(names)} delimiter='|'"
    answer = ask(("bjobs", "-a", "-noheader", "-o", wanted, job))
    if "is not found" in answer.stderr + answer.stdout:
        return None
    for line in answer.stdout.splitlines():
        values = [" ".join(each.split()) for each in line.split("|")]
        if answer.exit_code == 0 and len(values) >= len(names):
            return [None if each in ("", "-") else each for each in values]
    raise SchedulerError(_own_words(answer) or "bjobs prints nothing")


def minutes(text: str | None) -> float | None:
    """``90.0/hostA`` or ``120 second(s)`` in minutes."""
    match = re.match(r"([0-9]+(?:\.[0-9]*)?)( second)?", text or "")
    if match is None or len(match[1]) > 20:
        return None
    return float(match[1]) / (60 if match[2] else 1)


def _own_words(answer: CommandAnswer) -> str:
    """LSF's message in one line."""
    text = answer.stderr.strip() or answer.stdout
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return "; ".join(dict.fromkeys(lines))[:300]
