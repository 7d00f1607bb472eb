"""PBS: OpenPBS, PBS Professional, Torque. Hosts from PBS_NODEFILE; TM starts agents.

The agent on the host of the job's script is a child process, as with ``local``. OpenPBS
and PBS Professional answer in JSON; Torque's qstat knows only ``key = value``.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfcluster.base.durations import time_limit_s
from tfcluster.base.errors import ExitCode, StartError
from tfcluster.plan.model import Allocation, Description
from tfcluster.protocol.wire import loads
from tfcluster.schedulers.base import (
    Ask,
    BatchScheduler,
    CommandAnswer,
    JobPhase,
    JobState,
    SchedulerError,
    asker,
    one_line,
    placeholders,
    refusal,
)
from tfcluster.schedulers.file_starter import FileStarter, ask_gpus
from tfcluster.schedulers.job_hosts import (
    hosts_with_gpus,
    names_in_file,
    require_host_names,
)
from tfcluster.schedulers.pbs.settings import (
    ADVICE,
    EXAMPLE,
    OPTIONS,
    SYNONYMS,
    PbsSettings,
    chunks,
    directives,
    gpus_of_chunk,
    mistakes,
)

_ASK_S = 3.0
_SWEEP_S = 5.0
_KILL_DELAY_S = 10.0
"""The queue attribute kill_delay, if a queue does not set it."""
_STALE = "start a new shell, or `unset PBS_JOBID PBS_NODEFILE`, outside of a job"

_JOB_ID = re.compile(r"[0-9]+(?:\.[A-Za-z0-9_.-]+)?")
_COMMAND = "qsub: |qstat: "
"""The name of a command before its message."""
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


class PbsScheduler(BatchScheduler):
    """A host is a line of PBS_NODEFILE; it has as many slots as lines."""

    name = "pbs"
    title = "PBS"
    settings = PbsSettings
    mistakes = staticmethod(mistakes)
    directives = staticmethod(directives)
    options = OPTIONS
    launcher = "tm"
    example = EXAMPLE
    synonyms = SYNONYMS
    advice = ADVICE
    submit_command = "qsub"
    why_no_requeue = "PBS starts no job again at its time limit"
    without_gpus = "the job has none: ask for them: `-l select=N:ngpus=M` of qsub"

    def allocate(self, description: Description, env: Mapping[str, str]) -> Allocation:
        lines = granted(env)
        asked = self.settings_in(description).tasks_per_node
        hosts = hosts_with_gpus(
            {name: asked or count for name, count in Counter(lines).items()},
            description,
            env,
            lambda others: ask_gpus(others, _argv_on(env, lines), env),
        )
        return self.granted(description, hosts)

    def starter(self, description: Description, env: Mapping[str, str]) -> FileStarter:
        return FileStarter(description.python, _argv_on(env, granted(env)), env)

    def expected(self, description: Description) -> Allocation:
        pbs = self.settings_in(description)
        count, each = chunks(description, pbs)
        devices = gpus_of_chunk(description, pbs, each) or None
        return self.granted(description, placeholders(count, each, devices))

    def more_slots(self, tasks: int, hosts: int) -> str:
        each = -(-tasks // hosts)
        return f"ask for them: `-l select={hosts}:ncpus={each}:mpiprocs={each}` of qsub"

    def is_inside(self, env: Mapping[str, str]) -> bool:
        return bool(env.get("PBS_JOBID") and env.get("PBS_NODEFILE"))

    def submit(self, script: Path, ask: Ask) -> str:
        answer = ask(("qsub", str(script)))
        for line in reversed(answer.stdout.splitlines()):
            if answer.exit_code == 0 and _JOB_ID.fullmatch(line.strip()):
                return line.strip()
        raise refusal("qsub", one_line(answer, _COMMAND), _HINTS)

    def state(self, job: str, ask: Ask) -> JobState:
        """The job's state; PBS forgets a job that is over unless it keeps a history."""
        facts = _job_facts(job, ask)
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

    def cancel_argvs(self, job: str) -> tuple[tuple[str, ...], ...]:
        # SIGTERM, and after kill_delay SIGKILL.
        return (self.kill_argv(job),)

    def kill_argv(self, job: str) -> tuple[str, ...]:
        return ("qdel", job)

    def longest_grace_s(self, env: Mapping[str, str]) -> float | None:
        """The queue's kill_delay, less the time of a sweep."""
        name = env.get("PBS_QUEUE", "")
        answer = asker(env, _ASK_S)(("qstat", "-Q", "-f", "-F", "json", name))
        facts = (_section(answer, "Queue") or {}).get(name)
        if facts is None:
            return None
        delay = str(facts.get("kill_delay", ""))
        delay_s = float(delay) if delay.isdecimal() else _KILL_DELAY_S
        return max(1.0, delay_s - _SWEEP_S)

    def why_ending(self, env: Mapping[str, str]) -> ExitCode | None:
        """qdel and the time limit send the same signal: compare the job's times."""
        try:
            facts = _job_facts(env.get("PBS_JOBID", ""), asker(env, _ASK_S))
        except SchedulerError:
            return None
        used, limit = (
            _walltime(facts, name) for name in ("resources_used", "Resource_List")
        )
        # resources_used is renewed every minute or two.
        over = used is not None and limit is not None and used >= limit - 120
        return ExitCode.TIME_LIMIT if over else None

    def array_index(self, env: Mapping[str, str]) -> str | None:
        return env.get("PBS_ARRAY_INDEX") or env.get("PBS_ARRAYID")


def granted(env: Mapping[str, str]) -> list[str]:
    """The lines of PBS_NODEFILE: a host's name for each of its slots.

    Raises StartError outside of a job, ConfigError if the file is unusable.
    """
    if not SCHEDULER.is_inside(env):
        hint = "`tfcluster submit`, or launch in a job of qsub"
        raise StartError("not inside a PBS job", hint=hint)
    path = env["PBS_NODEFILE"]
    names = names_in_file("PBS_NODEFILE", path, _STALE)
    require_host_names(f"PBS_NODEFILE={path!r}", names, _STALE)
    return names


def _argv_on(
    env: Mapping[str, str], lines: Sequence[str]
) -> Callable[[str], tuple[str, ...]]:
    """How to run a command on a host: by name, or by the number of its first line."""
    named = shutil.which("pbs_tmrsh", path=env.get("PATH"))
    if named is not None:
        return lambda host: (named, host)
    numbered = shutil.which("pbsdsh", path=env.get("PATH")) or "pbsdsh"
    return lambda host: (numbered, "-n", str(lines.index(host)))


def _walltime(facts: Mapping[str, object] | None, name: str) -> int | None:
    """``walltime`` of a group of attributes; Torque's are ``name.walltime``."""
    known = facts or {}
    group = known.get(name)
    text = group.get("walltime") if isinstance(group, dict) else None
    text = text or known.get(f"{name}.walltime")
    return time_limit_s(str(text)) if text else None


def _job_facts(job: str, ask: Ask) -> Mapping[str, Any] | None:
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
    found = _section(answer, "Jobs")
    if found is None:
        raise SchedulerError(one_line(answer, _COMMAND) or "qstat prints nothing")
    # The server's name may be longer in the answer.
    number = job.partition(".")[0]
    return next((f for k, f in found.items() if k.partition(".")[0] == number), None)


def _section(answer: CommandAnswer, name: str) -> dict[str, dict[str, Any]] | None:
    """``{"Jobs": {"12.server": {...}}}``; None if it is not such an answer."""
    try:
        found = loads(answer.stdout.encode())
    except ValueError:
        return None
    entries = found.get(name) if isinstance(found, dict) else None
    if not isinstance(entries, dict):
        return None
    return {str(k): each for k, each in entries.items() if isinstance(each, dict)}


SCHEDULER = PbsScheduler()
