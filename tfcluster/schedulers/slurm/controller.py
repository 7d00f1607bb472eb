"""Asks Slurm's controller: queues and follows a job, and asks about our own job."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from tfcluster.base.errors import ExitCode
from tfcluster.schedulers.base import (
    Ask,
    JobPhase,
    JobState,
    SchedulerError,
    asker,
    one_line,
    output_of,
)
from tfcluster.schedulers.slurm.srun import own_words

ASK_S = 3.0
"""How long questions inside of a job may take: their callers are in a hurry."""
REQUEUE_S = 10.0
_TRIES = 3
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z/:_]*)=(\S*)")
_KILL_WAIT = re.compile(r"^KillWait\s*=\s*([0-9]{1,9}) sec", re.MULTILINE)
_SRUN_PORTS = re.compile(
    r"^SrunPortRange\s*=\s*([0-9]{1,5})-([0-9]{1,5})", re.MULTILINE
)

JOB_ID = re.compile(r"^([0-9]+)(?:;[A-Za-z0-9_.-]+)?\s*$", re.MULTILINE)
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT")
_PENDING = ("PENDING", "CONFIGURING", "REQUEUE", "RESV_DEL_HOLD", "SPECIAL_EXIT")

_REASONS = {
    "Resources": "waits until enough nodes are free",
    "Priority": "jobs of higher priority come first",
    "JobHeldUser": "held by its owner; `scontrol release` releases it",
    "JobHeldAdmin": "held by an administrator",
    "PartitionConfig": "the partition cannot satisfy its request",
    "PartitionNodeLimit": "it asks for more nodes than the partition has or allows",
    "PartitionTimeLimit": "it asks for more time than the partition allows",
    "ReqNodeNotAvail": "a node that it needs is not available",
    "BadConstraints": "no nodes match its request",
    "AssocMaxJobsLimit": "you have reached your account's limit of jobs",
    "launch failed requeued held": "it could not be started on its node",
}
"""Meanings of reasons; other reasons are shown as they are."""
HINTS = {
    "Invalid partition": "`sinfo` lists the partitions",
    "Invalid account": "slurm: {account: ...}",
    "node configuration is not available": "`sinfo -N -l` shows what nodes have",
    "time limit": "slurm: {time: ...}",
    "contact slurm controller": "`scontrol ping` checks it",
    "configuration source": "is this a login node of the cluster?",
}
COMMAND = "[a-z]+: (?:error: |fatal: )?"
"""The name of a command before its message."""


def config(env: Mapping[str, str]) -> str:
    """The configuration of Slurm; "" if unknown."""
    return output_of(("scontrol", "show", "config"), env, ASK_S)


def own_job(env: Mapping[str, str]) -> dict[str, str]:
    """The facts about the job that we are in; {} if unknown."""
    argv = ("scontrol", "show", "job", "--oneliner", env.get("SLURM_JOB_ID", ""))
    return fields(output_of(argv, env, ASK_S))


def requeue(env: Mapping[str, str]) -> str | None:
    """Requeue our job; returns why this was not possible, or None."""
    job = env.get("SLURM_JOB_ID", "")
    if "CANCELLED" in own_job(env).get("JobState", ""):
        return f"job {job} was cancelled"
    for _ in range(_TRIES):
        answer = asker(env, REQUEUE_S)(("scontrol", "requeue", job))
        if answer.exit_code != -signal.SIGTERM:
            break
        # Slurm ends every process of the job at its time limit, and also when it has
        # been told to requeue the job.
        if ending(own_job(env), starts_before(env)) is ExitCode.PREEMPTED:
            return None
    if answer.exit_code == 0:
        return None
    return own_words(answer.stderr) or f"scontrol exited with {answer.exit_code}"


def fields(answer: str) -> dict[str, str]:
    """The ``Key=Value`` words of ``scontrol --oneliner``; of duplicates, the first."""
    facts: dict[str, str] = {}
    for match in _FIELD.finditer(answer):
        facts.setdefault(match[1], match[2])
    return facts


def kill_wait_s(config: str) -> float | None:
    """Seconds between SIGTERM and SIGKILL to a job: ``KillWait = 30 sec``."""
    match = _KILL_WAIT.search(config)
    return float(match[1]) if match else None


def srun_ports(config: str) -> range | None:
    """``SrunPortRange = 60001-63000``: the ports that firewalls allow; None: all."""
    match = _SRUN_PORTS.search(config)
    ports = range(int(match[1]), int(match[2]) + 1) if match else range(0)
    return ports if 0 < ports.start <= ports.stop <= 1 << 16 else None


def has_gpus(job: Mapping[str, str]) -> bool:
    """Whether a job's resources have GPUs; salloc's shell has no variable for that."""
    return any(
        "gpu" in value
        for key, value in job.items()
        if "TresPer" in key or "TRES" in key
    )


def ending(job: Mapping[str, str], starts: int) -> ExitCode | None:
    """PREEMPTED (or requeued) or TIME_LIMIT; None: cancelled by a user, or unknown.

    ``starts`` is the number of times that the job had been restarted when we started.
    """
    state = job.get("JobState", "")
    if "PREEMPTED" in state or "REQUEUE" in state:
        return ExitCode.PREEMPTED
    if job.get("PreemptTime", "None") not in ("None", "Unknown"):
        return ExitCode.PREEMPTED
    # The state of a requeued job is COMPLETING until its processes have ended.
    if _count(job.get("Restarts", "")) > starts:
        return ExitCode.PREEMPTED
    if "TIMEOUT" in state or job.get("Reason") == "TimeLimit":
        return ExitCode.TIME_LIMIT
    return None


def starts_before(env: Mapping[str, str]) -> int:
    """How many times the job had been restarted when we started."""
    return _count(env.get("SLURM_RESTART_COUNT", ""))


def _count(text: str) -> int:
    """A number of restarts; 0 if unknown."""
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def state(job: str, ask: Ask) -> JobState:
    """squeue also knows jobs that are over, for a while."""
    argv = ("squeue", "--noheader", "--states=all", f"--jobs={job}", "-o", "%T|%r")
    answer = ask(argv)
    if answer.exit_code != 0:
        if "Invalid job id" in answer.stderr:
            return JobState(JobPhase.GONE, "gone")
        raise SchedulerError(one_line(answer, COMMAND) or "squeue failed")
    word, _, reason = answer.stdout.partition("\n")[0].strip().partition("|")
    if not word:
        return JobState(JobPhase.GONE, "gone")
    return JobState(_phase(word), word, _reason(reason.strip()))


def _phase(word: str) -> JobPhase:
    if word.startswith(_PENDING):
        return JobPhase.PENDING
    return JobPhase.RUNNING if word.startswith(_RUNNING) else JobPhase.OVER


def _reason(text: str) -> str | None:
    word = text.strip("()")
    meaning = _REASONS.get(word.split(",")[0])
    if word in ("", "None"):
        return None
    return f"{word}: {meaning}" if meaning else word
