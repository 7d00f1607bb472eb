"""Queues and follows a job with sbatch, squeue and scancel. Pure but for ``ask``."""

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

_JOB_ID = re.compile(r"([0-9]+)(?:;[A-Za-z0-9_.-]+)?")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
_PENDING = ("PENDING", "CONFIGURING", "REQUEUE", "RESV_DEL_HOLD", "SPECIAL_EXIT")

_REASONS = {
    "Resources": "waits until enough nodes are free",
    "Priority": "jobs of higher priority come first",
    "BeginTime": "its start time has not been reached",
    "Dependency": "waits for another job",
    "JobHeldUser": "held by its owner; `scontrol release` releases it",
    "JobHeldAdmin": "held by an administrator",
    "Licenses": "waits for a licence",
    "NodeDown": "a node that it needs is down",
    "PartitionConfig": "the partition cannot satisfy its request",
    "PartitionNodeLimit": "it asks for more nodes than the partition has or allows",
    "PartitionTimeLimit": "it asks for more time than the partition allows",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "ReqNodeNotAvail": "a node that it needs is not available",
    "BadConstraints": "no nodes match its request",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its quality of service is not valid",
    "AssocMaxJobsLimit": "you have reached your account's limit of jobs",
    "JobLaunchFailure": "it could not be started on its node",
    "launch failed requeued held": "it could not be started on its node",
    "None": None,
    "": None,
}


def submit(script: Path, ask: Ask) -> str:
    answer = ask(("sbatch", "--parsable", str(script)))
    lines = answer.stdout.split()
    match = _JOB_ID.fullmatch(lines[-1]) if lines else None
    if answer.exit_code != 0 or match is None:
        raise _refusal(answer)
    return match[1]


def state(job: str, ask: Ask) -> JobState:
    """squeue also knows jobs that are over, for a while."""
    argv = ("squeue", "--noheader", "--states=all", f"--jobs={job}", "-o", "%T|%r")
    answer = ask(argv)
    if answer.exit_code != 0:
        if "Invalid job id" in answer.stderr:
            return JobState(JobPhase.GONE, "gone")
        raise SchedulerError(_own_words(answer) or "squeue failed")
    lines = answer.stdout.split("\n")
    word, _, reason = lines[0].strip().partition("|")
    if not word:
        return JobState(JobPhase.GONE, "gone")
    return JobState(_phase(word), word, _reason(reason.strip()))


def _phase(word: str) -> JobPhase:
    if word.startswith(_PENDING):
        return JobPhase.PENDING
    return JobPhase.RUNNING if word.startswith(_RUNNING) else JobPhase.OVER


def _reason(text: str) -> str | None:
    """``(Resources)`` with its meaning."""
    known = text.strip("()")
    meaning = _REASONS.get(known.split(",")[0], "")
    if meaning is None:
        return None
    return f"{known}: {meaning}" if meaning else known


def _refusal(answer: CommandAnswer) -> SchedulerError:
    said = _own_words(answer)
    hints = {
        "Invalid partition": "`sinfo` lists the partitions",
        "Invalid account": "slurm: {account: ...}",
        "node configuration is not available": "`sinfo -N -l` shows what nodes have",
        "time limit": "slurm: {time: ...}",
        "contact slurm controller": "`scontrol ping` checks it",
        "configuration source": "is this a login node of the cluster?",
    }
    hint = next((text for word, text in hints.items() if word in said), None)
    return SchedulerError(f"sbatch refused the job: {said or 'no answer'}", hint)


def _own_words(answer: CommandAnswer) -> str:
    """Slurm's message in one line, without the names of its commands."""
    lines = [
        re.sub(r"^[a-z]+: (?:error: |fatal: )?", "", line.strip())
        for line in answer.stderr.splitlines()
        if line.strip()
    ]
    return "; ".join(dict.fromkeys(lines))
