"""Queues and follows a job with qsub, qstat and qdel. Pure but for ``ask``.

OpenPBS and PBS Professional answer in JSON; Torque's qstat knows only ``key = value``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfcluster.protocol.wire import loads
from tfcluster.schedulers.base import (
    Ask,
    CommandAnswer,
    JobPhase,
    JobState,
    SchedulerError,
)

_JOB_ID = re.compile(r"[0-9]+(?:\.[A-Za-z0-9_.-]+)?")
_FIELD = re.compile(r"^ {4}(\S+) = (.*(?:\n\t.*)*)", re.MULTILINE)
_UNKNOWN = re.compile(r"Unknown Job Id|Job has finished", re.IGNORECASE)
_WORDS = {
    "Q": (JobPhase.PENDING, "queued"),
    "H": (JobPhase.PENDING, "held"),
    "W": (JobPhase.PENDING, "waiting"),
    "T": (JobPhase.PENDING, "moving"),
    "M": (JobPhase.PENDING, "moved"),
    "R": (JobPhase.RUNNING, "running"),
    "B": (JobPhase.RUNNING, "begun"),
    "E": (JobPhase.RUNNING, "exiting"),
    "S": (JobPhase.RUNNING, "suspended"),
    "U": (JobPhase.RUNNING, "suspended"),
    "F": (JobPhase.OVER, "finished"),
    "X": (JobPhase.OVER, "finished"),
    "C": (JobPhase.OVER, "completed"),
}
"""job_state -> what it means and a word for it."""
_HINTS = {
    "Unknown queue": "`qstat -Q` lists the queues; pbs: {queue: ...}",
    "exceeds queue": "`qstat -Qf` shows the limits of the queues",
    "Unknown resource": "`pbsnodes -a` shows what hosts have",
    "Unauthorized Request": "`qstat -Qf` shows who may use a queue",
    "cannot connect to server": "`qstat -B` checks it",
    "Connection refused": "`qstat -B` checks it",
}


def submit(script: Path, ask: Ask) -> str:
    answer = ask(("qsub", str(script)))
    for line in reversed(answer.stdout.splitlines()):
        if answer.exit_code == 0 and _JOB_ID.fullmatch(line.strip()):
            return line.strip()
    said = _own_words(answer)
    hint = next((hint for word, hint in _HINTS.items() if word in said), None)
    raise SchedulerError(f"qsub refused the job: {said or 'no answer'}", hint)


def state(job: str, ask: Ask) -> JobState:
    """The job's state; PBS forgets a job that is over unless it keeps a history."""
    facts = job_facts(job, ask)
    if facts is None:
        return JobState(JobPhase.GONE, "gone")
    letter = str(facts.get("job_state", ""))
    phase, word = _WORDS.get(letter, (JobPhase.RUNNING, letter))
    reason = " ".join(str(facts.get("comment") or "").split()) or None
    if letter == "H":
        reason = f"`qrls {job}` releases it"
    status = facts.get("Exit_status", facts.get("exit_status"))
    if phase is JobPhase.OVER and status is not None:
        reason = f"exit status {status}"
    return JobState(phase, word, reason)


def job_facts(job: str, ask: Ask) -> Mapping[str, Any] | None:
    """The job's attributes; None if PBS does not know it. Raises SchedulerError."""
    answer = ask(("qstat", "-x", "-f", "-F", "json", job))
    if answer.exit_code != 0 and "invalid option" in answer.stderr:
        answer = ask(("qstat", "-f", job))
        if answer.exit_code == 0:
            return {
                match[1]: match[2].replace("\n\t", "")
                for match in _FIELD.finditer(answer.stdout)
            }
    if _UNKNOWN.search(answer.stderr):
        return None
    found = section(answer, "Jobs")
    if found is None:
        raise SchedulerError(_own_words(answer) or "qstat prints nothing")
    # The server's name may be longer in the answer.
    number = job.partition(".")[0]
    return next((f for k, f in found.items() if k.partition(".")[0] == number), None)


def section(answer: CommandAnswer, name: str) -> dict[str, dict[str, Any]] | None:
    """``{"Jobs": {"12.server": {...}}}``; None if it is not such an answer."""
    try:
        found = loads(answer.stdout.encode())
    except ValueError:
        return None
    entries = found.get(name) if isinstance(found, dict) else None
    if not isinstance(entries, dict):
        return None
    return {str(k): each for k, each in entries.items() if isinstance(each, dict)}


def _own_words(answer: CommandAnswer) -> str:
    """PBS's message in one line, without the names of its commands."""
    lines = [
        re.sub(r"^(?:qsub|qstat): ", "", line.strip())
        for line in (answer.stderr or answer.stdout).splitlines()
        if line.strip()
    ]
    return "; ".join(dict.fromkeys(lines))[:300]
