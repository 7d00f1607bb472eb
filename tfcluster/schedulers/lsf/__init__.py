"""LSF: the hosts of a job from its variables; blaunch starts agents on them.

The agent on the host of the job's script is a child process, as with ``local``. Jobs
are queued with bsub and followed with bjobs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from tfcluster.base.durations import time_limit_s
from tfcluster.base.errors import ConfigError, ExitCode, Problem
from tfcluster.plan.model import Allocation, Description
from tfcluster.schedulers.base import (
    Ask,
    BatchScheduler,
    JobPhase,
    JobState,
    LauncherCommand,
    SchedulerError,
    asker,
    gpus_of_all,
    one_line,
    placeholders,
    setting,
)
from tfcluster.schedulers.file_starter import FileStarter, ask_gpus
from tfcluster.schedulers.job_hosts import (
    host_file,
    hosts_with_gpus,
    require_host_names,
)
from tfcluster.schedulers.options import (
    BASH,
    ENVIRONMENT,
    FOLLOWS,
    NOTHING,
    OTHER_USER,
    OUTPUT,
    RESTART,
    SCRIPT,
    SIZE,
    WORKDIR,
    Mistake,
    OptionTable,
    lines,
)
from tfcluster.schedulers.script import into_log

_ASK_S = 3.0
_SWEEP_S = 20
_STALE = "start a new shell, or `unset ${!LSB_@}`, if this shell is not inside a job"


@dataclass(frozen=True, slots=True, kw_only=True)
class LsfSettings:
    """What is requested from LSF. The number of slots follows from `tasks`."""

    tasks_per_node: int | None = setting("count", "span[ptile=N]: tasks on each host.")
    mem: str | None = setting("memory", "rusage[mem=...], as 16G.")
    gpus_per_node: int | None = setting(
        "gpus",
        "bsub -gpu num=N. Default: what `gpus` of the tasks needs.",
        option="-gpu",
    )
    queue: str | None = setting("word", "bsub -q.", option="-q")
    project: str | None = setting("word", "bsub -P.", option="-P")
    time: str | None = setting("time", 'bsub -W: as 4h, or "HH:MM:SS".', option="-W")
    options: tuple[str, ...] = setting(
        "options", "More options of bsub, one word per item.", ()
    )


_EXAMPLE = """\
backend: lsf                     # `tfcluster launch` submits a job, or uses its own
lsf:
  tasks_per_node: 1              # otherwise LSF fills one host after the other
  time: 1h
  # mem: 16G
  # queue: normal
  # project: x
  # options: ["-R", "select[mem>64000]"]  # any other options of bsub
"""
_OPTIONS = OptionTable(
    command="bsub",
    plain=re.compile(r"[A-Za-z0-9_./+@=,:%*<>&|!()\[\] -]+"),
    denied={
        "-J": "the name is the run's, and every element of an array the same run",
        **dict.fromkeys(
            ("-K", "-I", "-Ip", "-Is", "-IS", "-ISp", "-ISs", "-IX"), FOLLOWS
        ),
        **dict.fromkeys(("-o", "-oo", "-e", "-eo", "-tty"), OUTPUT),
        **dict.fromkeys(("-i", "-is"), "the launcher reads no input"),
        "-env": ENVIRONMENT,
        "-L": BASH,
        "-cwd": WORKDIR,
        **dict.fromkeys(("-json", "-yaml", "-jsdl", "-pack", "-Zs"), SCRIPT),
        "-n": SIZE,
        **dict.fromkeys(("-r", "-Q"), RESTART),
        "-user": OTHER_USER,
        **dict.fromkeys(("-h", "-V"), NOTHING),
    },
)
_PLAIN = re.compile(r"[A-Za-z0-9_./+@=,:%-]+")

_JOB_ID = re.compile(r"^Job <([0-9]+)> is submitted to ", re.MULTILINE)
_PENDING = ("PEND", "PSUSP", "WAIT", "PROV", "FWD_PEND")
_OVER = ("DONE", "EXIT", "POST_DONE", "POST_ERR")


class LsfScheduler(BatchScheduler):
    """The hosts and slots of LSB_DJOB_HOSTFILE, or else of LSB_MCPU_HOSTS."""

    name = "lsf"
    title = "LSF"
    settings = LsfSettings
    options = _OPTIONS
    launcher = "blaunch"
    example = _EXAMPLE
    synonyms: Mapping[str, str] = {"account": "project"}
    advice: Mapping[str, str] = {
        **dict.fromkeys(
            ("nodes", "hosts"), "tasks_per_node: N; LSF then chooses hosts"
        ),
        **dict.fromkeys(("r", "resources"), 'options: ["-R", "select[type==any]"]'),
    }
    submit_command = "bsub"
    job_id = _JOB_ID
    hints: Mapping[str, str] = {
        "No such queue": "`bqueues` lists the queues; lsf: {queue: ...}",
        "Bad resource requirement": "`lsinfo` lists the resources",
        "User cannot use the queue": "`bqueues -l QUEUE` shows who may",
        "Cannot exceed queue's hard limit": "`bqueues -l QUEUE` shows the limits",
        "LSF is down": "`lsid` checks it",
        "Failed in an LSF library call": "`lsid` checks it",
    }
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
        self.require_inside(env)
        return FileStarter(description.python, _argv_on, env)

    def expected(self, description: Description) -> Allocation:
        lsf, tasks = self.settings_in(description), len(description.task_ids())
        slots = lsf.tasks_per_node or tasks
        devices = gpus_of_host(description, lsf) or None
        return self.granted(
            description, placeholders(ceil(tasks / slots), slots, devices)
        )

    def more_slots(self, tasks: int, hosts: int) -> str:
        return f"ask for them: `-n {tasks}` of bsub"

    def mistakes(self, description: Description, lsf: LsfSettings) -> Iterator[Mistake]:
        tasks, slots = len(description.task_ids()), lsf.tasks_per_node
        if slots is not None and slots > tasks:
            message = f"{slots} tasks on each host are more than {tasks}"
            yield Mistake("lsf.tasks_per_node", message, "omit it", "tasks")

    def is_inside(self, env: Mapping[str, str]) -> bool:
        listed = env.get("LSB_DJOB_HOSTFILE") or env.get("LSB_MCPU_HOSTS")
        return bool(env.get("LSB_JOBID") and listed)

    def directives(
        self, description: Description, lsf: LsfSettings, launcher: LauncherCommand
    ) -> Iterator[str]:
        yield from (f"#BSUB {line}" for line in _requests(description, lsf))
        yield from _limit(description, lsf)
        yield from (f"#BSUB {line}" for line in lines(lsf.options, _quoted))
        yield ""
        yield "# Pass nothing from the submitting shell; use 'env:' and 'secrets:'."
        yield '#BSUB -env "none"'
        yield "#BSUB -L /bin/bash"
        yield "# LSF would copy the output only at the end."
        yield "#BSUB -o /dev/null"
        yield "# A lost host ends the run; it is not restarted silently."
        yield "#BSUB -rn"
        yield ""
        yield from into_log(launcher)

    def submit_argv(self, script: Path) -> tuple[str, ...]:
        """bsub reads directives only from its standard input."""
        return ("/bin/sh", "-c", 'exec bsub < "$0"', str(script))

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


def gpus_of_host(description: Description, lsf: LsfSettings) -> int:
    if lsf.gpus_per_node is not None:
        return lsf.gpus_per_node
    slots = lsf.tasks_per_node or len(description.task_ids())
    most = max(group.gpus or 0 for group in description.tasks.values())
    return min(gpus_of_all(description) or 0, slots * most)


def _requests(description: Description, lsf: LsfSettings) -> Iterator[str]:
    yield f"-J {_quoted(description.name)}"
    yield f"-n {len(description.task_ids())}"
    if lsf.tasks_per_node is not None:
        yield f'-R "span[ptile={lsf.tasks_per_node}]"'
    if lsf.mem is not None:
        yield f'-R "rusage[mem={lsf.mem}]"'
    if "-gpu" not in lsf.options and (gpus := gpus_of_host(description, lsf)):
        yield f'-gpu "num={gpus}"'
    if lsf.queue is not None:
        yield f"-q {lsf.queue}"
    if lsf.project is not None:
        yield f"-P {lsf.project}"


def _limit(description: Description, lsf: LsfSettings) -> Iterator[str]:
    limit_s = None if lsf.time is None else time_limit_s(lsf.time)
    if limit_s is None:
        return
    minutes = ceil(limit_s / 60)
    yield f"#BSUB -W {minutes // 60}:{minutes % 60:02}"
    warning = ceil((description.grace_s + _SWEEP_S) / 60)
    if warning < minutes:
        yield "# A warning signal to the launcher, which ends the run with code 124."
        yield "#BSUB -wa USR1"
        yield f"#BSUB -wt {warning}"


def _quoted(word: str) -> str:
    return word if _PLAIN.fullmatch(word) else f'"{word}"'


def granted_slots(env: Mapping[str, str]) -> dict[str, int]:
    """Host -> slots, in LSF's order. Raises StartError or ConfigError."""
    SCHEDULER.require_inside(env)
    if path := env.get("LSB_DJOB_HOSTFILE"):
        where = f"LSB_DJOB_HOSTFILE={path!r}"
        names = host_file("LSB_DJOB_HOSTFILE", path, _STALE).split()
        slots = dict(Counter(names))
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
    """Fields of a job, None for ``-``; None: no such job. Raises SchedulerError."""
    columns = f"{' '.join(names)} delimiter='|'"
    answer = ask(("bjobs", "-a", "-noheader", "-o", columns, job))
    if "is not found" in answer.stderr + answer.stdout:
        return None
    for line in answer.stdout.splitlines():
        values = [" ".join(value.split()) for value in line.split("|")]
        if answer.exit_code == 0 and len(values) >= len(names):
            return [None if value in ("", "-") else value for value in values]
    raise SchedulerError(one_line(answer) or "bjobs prints nothing")


def _minutes(text: str | None) -> float | None:
    match = re.match(r"([0-9]+(?:\.[0-9]*)?)( second)?", text or "")
    if match is None or len(match[1]) > 20:
        return None
    return float(match[1]) / (60 if match[2] else 1)


SCHEDULER = LsfScheduler()
