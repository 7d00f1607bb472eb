"""LSF: the hosts of a job from its variables; blaunch starts agents on them.

The agent on the host of the job's script is a child process, as with ``local``. Jobs
are queued with bsub and followed with bjobs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tfcluster.base.errors import ConfigError, ExitCode, Problem, StartError
from tfcluster.plan.model import Allocation, Description
from tfcluster.schedulers.base import (
    Ask,
    BatchScheduler,
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
from tfcluster.schedulers.lsf.settings import (
    ADVICE,
    EXAMPLE,
    OPTIONS,
    SYNONYMS,
    LsfSettings,
    directives,
    gpus_of_host,
    mistakes,
)

_ASK_S = 3.0
_STALE = "start a new shell, or `unset ${!LSB_@}`, if this shell is not inside a job"

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


class LsfScheduler(BatchScheduler):
    """The hosts and slots of LSB_DJOB_HOSTFILE, or else of LSB_MCPU_HOSTS."""

    name = "lsf"
    title = "LSF"
    settings = LsfSettings
    mistakes = staticmethod(mistakes)
    directives = staticmethod(directives)
    options = OPTIONS
    launcher = "blaunch"
    example = EXAMPLE
    synonyms = SYNONYMS
    advice = ADVICE
    submit_command = "bsub"
    why_no_requeue = "LSF starts no job again at its run limit"
    without_gpus = 'the job has none: ask for them: `-gpu "num=N"` of bsub'

    def allocate(self, description: Description, env: Mapping[str, str]) -> Allocation:
        hosts = hosts_with_gpus(
            granted_slots(env),
            description,
            env,
            lambda others: ask_gpus(others, _argv_on, env),
        )
        return self.granted(description, hosts)

    def starter(self, description: Description, env: Mapping[str, str]) -> FileStarter:
        granted_slots(env)
        return FileStarter(description.python, _argv_on, env)

    def expected(self, description: Description) -> Allocation:
        lsf, tasks = self.settings_in(description), len(description.task_ids())
        each = lsf.tasks_per_node or tasks
        devices = gpus_of_host(description, lsf) or None
        return self.granted(description, placeholders(-(-tasks // each), each, devices))

    def more_slots(self, tasks: int, hosts: int) -> str:
        return f"ask for them: `-n {tasks}` of bsub"

    def is_inside(self, env: Mapping[str, str]) -> bool:
        listed = env.get("LSB_DJOB_HOSTFILE") or env.get("LSB_MCPU_HOSTS")
        return bool(env.get("LSB_JOBID") and listed)

    def submit(self, script: Path, ask: Ask) -> str:
        """bsub reads directives only from its standard input."""
        answer = ask(("/bin/sh", "-c", 'exec bsub < "$0"', str(script)))
        match = _JOB_ID.search(answer.stdout)
        if answer.exit_code == 0 and match is not None:
            return match[1]
        raise refusal("bsub", one_line(answer), _HINTS)

    def state(self, job: str, ask: Ask) -> JobState:
        """bjobs also knows jobs that are over, for an hour by default."""
        values = _fields(job, ("stat", "exit_code", "exit_reason", "pend_reason"), ask)
        if values is None:
            return JobState(JobPhase.GONE, "gone")
        word, code, why, waits = values[0] or "", *values[1:4]
        if word in _OVER:
            reason = why or (f"exit status {code}" if code else None)
            return JobState(JobPhase.OVER, word, reason)
        if word == "PSUSP":
            return JobState(JobPhase.PENDING, word, f"`bresume {job}` releases it")
        phase = JobPhase.PENDING if word in _PENDING else JobPhase.RUNNING
        return JobState(phase, word, waits if phase is JobPhase.PENDING else None)

    def cancel_argvs(self, job: str) -> tuple[tuple[str, ...], ...]:
        # SIGINT and SIGTERM, and after JOB_TERMINATE_INTERVAL SIGKILL.
        return (("bkill", job),)

    def kill_argv(self, job: str) -> tuple[str, ...]:
        return ("bkill", "-s", "KILL", job)

    def why_ending(self, env: Mapping[str, str]) -> ExitCode | None:
        """bkill and the run limit send the same signals: compare the job's times."""
        job, ask = env.get("LSB_JOBID", ""), asker(env, _ASK_S)
        try:
            times = _fields(job, ("run_time", "runtimelimit"), ask)
        except SchedulerError:
            return None
        used, limit = map(_minutes, times or (None, None))
        over = used is not None and limit is not None and used >= limit - 0.1
        return ExitCode.TIME_LIMIT if over else None

    def array_index(self, env: Mapping[str, str]) -> str | None:
        index = env.get("LSB_JOBINDEX", "0")
        return None if index in ("", "0") else index


def granted_slots(env: Mapping[str, str]) -> dict[str, int]:
    """Host -> slots, in LSF's order.

    Raises StartError outside of a job, ConfigError if the variables are unusable.
    """
    if not SCHEDULER.is_inside(env):
        hint = "`tfcluster submit`, or launch in a job of bsub"
        raise StartError("not inside an LSF job", hint=hint)
    if path := env.get("LSB_DJOB_HOSTFILE"):
        where = f"LSB_DJOB_HOSTFILE={path!r}"
        slots = dict(Counter(names_in_file("LSB_DJOB_HOSTFILE", path, _STALE)))
    else:
        where = f"LSB_MCPU_HOSTS={env['LSB_MCPU_HOSTS']!r}"
        words = env["LSB_MCPU_HOSTS"].split()
        counts = [word for word in words[1::2] if re.fullmatch("[1-9][0-9]{0,8}", word)]
        if 2 * len(counts) != len(words):
            problem = "is not a list of hosts, each with its slots"
            raise ConfigError([Problem(where, problem, _STALE)])
        slots = dict(zip(words[::2], map(int, counts), strict=True))
    require_host_names(where, slots, _STALE)
    return slots


def _argv_on(host: str) -> tuple[str, ...]:
    return ("blaunch", host)


def _fields(job: str, names: tuple[str, ...], ask: Ask) -> list[str | None] | None:
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
    raise SchedulerError(one_line(answer) or "bjobs prints nothing")


def _minutes(text: str | None) -> float | None:
    """``90.0/hostA`` or ``120 second(s)`` in minutes."""
    match = re.match(r"([0-9]+(?:\.[0-9]*)?)( second)?", text or "")
    if match is None or len(match[1]) > 20:
        return None
    return float(match[1]) / (60 if match[2] else 1)


SCHEDULER = LsfScheduler()
