"""Asks Slurm's controller: queues and follows a job, and asks about our own job.

Pure functions parse the answers. ``Controller`` runs commands inside of a job, never
for longer than ``ASK_S``, because its callers are in a hurry.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from pathlib import Path

from tfcluster.base.errors import ExitCode
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.schedulers.base import (
    Ask,
    JobPhase,
    JobState,
    SchedulerError,
    asker,
    one_line,
    output_of,
    refusal,
)
from tfcluster.schedulers.slurm.srun import own_words

ASK_S = 3.0
REQUEUE_S = 10.0
_TRIES = 3
_FIELD = re.compile(r"(?:^|\s)([A-Za-z][A-Za-z/:_]*)=(\S*)")
_KILL_WAIT = re.compile(r"^KillWait\s*=\s*([0-9]{1,9}) sec", re.MULTILINE)
_SRUN_PORTS = re.compile(
    r"^SrunPortRange\s*=\s*([0-9]{1,5})-([0-9]{1,5})", re.MULTILINE
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
_HINTS = {
    "Invalid partition": "`sinfo` lists the partitions",
    "Invalid account": "slurm: {account: ...}",
    "node configuration is not available": "`sinfo -N -l` shows what nodes have",
    "time limit": "slurm: {time: ...}",
    "contact slurm controller": "`scontrol ping` checks it",
    "configuration source": "is this a login node of the cluster?",
}
_COMMAND = "[a-z]+: (?:error: |fatal: )?"
"""The name of a command before its message."""


@dataclass(frozen=True, slots=True)
class Controller:
    """Asks ``scontrol``. ``environ`` is the job's environment."""

    environ: Mapping[str, str]

    def kill_wait_s(self) -> float | None:
        """Seconds between SIGTERM and SIGKILL to a job; None: unknown."""
        return parse_kill_wait(self._ask("show", "config"))

    def srun_ports(self) -> range | None:
        """The ports on which srun may listen, which firewalls allow; None: all."""
        return parse_srun_ports(self._ask("show", "config"))

    def has_gpus(self) -> bool:
        """Whether the job has GPUs; salloc's shell has no variable that says so."""
        return "gpu" in parse_requested(self._job_facts())

    def ending(self) -> ExitCode | None:
        """Why Slurm is about to end the job; see ``parse_ending``."""
        life = self.environ.get("SLURM_RESTART_COUNT", "")
        return parse_ending(self._job_facts(), life=_count(life))

    def why_not_requeuable(self) -> str | None:
        """Why the job cannot be requeued; None: it can be, or we do not know."""
        return parse_not_requeuable(self._job_facts(), self._job)

    def requeue(self) -> str | None:
        """Requeue the job; returns why this was not possible, or None."""
        if why := parse_ended(self._job_facts(), self._job):
            return why
        for _ in range(_TRIES):
            answer = asker(self.environ, REQUEUE_S)(("scontrol", "requeue", self._job))
            if answer.exit_code != -signal.SIGTERM:
                break
            # Slurm ends every process of the job at its time limit, and also when it
            # has been told to requeue the job.
            if self.ending() is ExitCode.PREEMPTED:
                return None
        if answer.exit_code == 0:
            return None
        return own_words(answer.stderr) or f"scontrol exited with {answer.exit_code}"

    @property
    def _job(self) -> str:
        return self.environ.get("SLURM_JOB_ID", "")

    def _job_facts(self) -> str:
        """What ``fields`` parses."""
        return self._ask("show", "job", "--oneliner", self._job)

    def _ask(self, *words: str) -> str:
        return output_of(("scontrol", *words), self.environ, ASK_S)


def fields(answer: str) -> dict[str, str]:
    """The ``Key=Value`` words of ``scontrol --oneliner``; of duplicates, the first."""
    found: dict[str, str] = {}
    for match in _FIELD.finditer(answer):
        found.setdefault(match[1], match[2])
    return found


def parse_kill_wait(answer: str) -> float | None:
    """Parse ``KillWait = 30 sec``, in seconds; None if there is no such line."""
    match = _KILL_WAIT.search(answer)
    return float(match[1]) if match else None


def parse_srun_ports(answer: str) -> range | None:
    """Parse ``SrunPortRange = 60001-63000``; None if there is no such range."""
    match = _SRUN_PORTS.search(answer)
    found = range(int(match[1]), int(match[2]) + 1) if match else range(0)
    return found if 0 < found.start <= found.stop <= 1 << 16 else None


def parse_requested(answer: str) -> str:
    """The job's trackable resources: ``gres:gpu:2``, ``gres/gpu:a100=4``."""
    resources = fields(answer).items()
    return " ".join(v for key, v in resources if "TresPer" in key or "TRES" in key)


def parse_ending(answer: str, *, life: int = 0) -> ExitCode | None:
    """PREEMPTED (or requeued) or TIME_LIMIT; None: cancelled by a user, or unknown.

    ``life`` is the number of times that the job had been restarted when we started.
    """
    facts = fields(answer)
    state = facts.get("JobState", "")
    if "PREEMPTED" in state or "REQUEUE" in state:
        return ExitCode.PREEMPTED
    if facts.get("PreemptTime", "None") not in ("None", "Unknown"):
        return ExitCode.PREEMPTED
    # The state of a requeued job is COMPLETING until its processes have ended.
    if _count(facts.get("Restarts", "")) > life:
        return ExitCode.PREEMPTED
    if "TIMEOUT" in state or facts.get("Reason") == "TimeLimit":
        return ExitCode.TIME_LIMIT
    return None


def parse_not_requeuable(answer: str, job: str) -> str | None:
    """Why Slurm would not requeue the job, from ``scontrol show job``; or None."""
    facts = fields(answer)
    if facts.get("BatchFlag") == "0":
        return f"job {job} has no batch script that could be started again"
    if facts.get("Requeue") == "0":
        return f"job {job} may not be requeued (Requeue=0)"
    return None


def parse_ended(answer: str, job: str) -> str | None:
    """Why the job must not start again: somebody has cancelled it; or None."""
    state = fields(answer).get("JobState", "")
    return f"job {job} was cancelled" if "CANCELLED" in state else None


def _count(text: str) -> int:
    """A number of restarts; 0 if unknown."""
    return int(text) if text.isdecimal() and len(text) < 10 else 0


def submit(script: Path, ask: Ask) -> str:
    answer = ask(("sbatch", "--parsable", str(script)))
    lines = answer.stdout.split()
    match = _JOB_ID.fullmatch(lines[-1]) if lines else None
    if answer.exit_code != 0 or match is None:
        raise refusal("sbatch", one_line(answer, _COMMAND), _HINTS)
    return match[1]


def state(job: str, ask: Ask) -> JobState:
    """squeue also knows jobs that are over, for a while."""
    argv = ("squeue", "--noheader", "--states=all", f"--jobs={job}", "-o", "%T|%r")
    answer = ask(argv)
    if answer.exit_code != 0:
        if "Invalid job id" in answer.stderr:
            return JobState(JobPhase.GONE, "gone")
        raise SchedulerError(one_line(answer, _COMMAND) or "squeue failed")
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
