"""LSF: the hosts of a job from its variables; blaunch starts agents on them.

The agent on the host of the job's script is a child process, as with ``local``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tfcluster.errors import ConfigError, ExitCode, Problem, StartError
from tfcluster.host_patterns import host_name_problem
from tfcluster.model import Allocation, Description, Host
from tfcluster.schedulers import gpus
from tfcluster.schedulers.base import BatchScheduler, SchedulerError, placeholders
from tfcluster.schedulers.file_starter import FileStarter, ask_gpus
from tfcluster.schedulers.lsf import queue
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
from tfcluster.schedulers.own_host import is_one_of, own_names
from tfcluster.schedulers.queries import asker

_ASK_S = 3.0
_STALE = "start a new shell, or `unset ${!LSB_@}`, if this shell is not inside a job"


class LsfScheduler(BatchScheduler):
    """The hosts and slots of LSB_DJOB_HOSTFILE, or else of LSB_MCPU_HOSTS."""

    name = "lsf"
    title = "LSF"
    settings = LsfSettings
    mistakes = staticmethod(mistakes)
    directives = staticmethod(directives)
    submit = staticmethod(queue.submit)
    state = staticmethod(queue.state)
    options = OPTIONS
    launcher = "blaunch"
    example = EXAMPLE
    synonyms = SYNONYMS
    advice = ADVICE
    submit_command = "bsub"
    why_no_requeue = "LSF starts no job again at its run limit"
    without_gpus = 'the job has none: ask for them: `-gpu "num=N"` of bsub'

    def allocate(self, description: Description, env: Mapping[str, str]) -> Allocation:
        slots, own = granted_slots(env), own_names(env)
        others = [name for name in slots if not is_one_of(name, own)]
        devices = dict.fromkeys(slots, gpus.given(env)) | dict.fromkeys(others)
        if others and any(group.gpus for group in description.tasks.values()):
            devices |= ask_gpus(others, _argv_on, env)
        hosts = [
            Host(name=name, slots=count, gpus=devices[name])
            for name, count in slots.items()
        ]
        return self.granted(description, hosts)

    def starter(self, description: Description, env: Mapping[str, str]) -> FileStarter:
        granted_slots(env)
        return FileStarter(description.python, own_names(env), _argv_on, env)

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

    def cancel_argvs(self, job: str) -> tuple[tuple[str, ...], ...]:
        # SIGINT and SIGTERM, and after JOB_TERMINATE_INTERVAL SIGKILL.
        return (("bkill", job),)

    def kill_argv(self, job: str) -> tuple[str, ...]:
        return ("bkill", "-s", "KILL", job)

    def why_ending(self, env: Mapping[str, str]) -> ExitCode | None:
        """bkill and the run limit send the same signals: compare the job's times."""
        job, ask = env.get("LSB_JOBID", ""), asker(env, _ASK_S)
        try:
            found = queue.fields(job, ("run_time", "runtimelimit"), ask)
        except SchedulerError:
            return None
        used, limit = map(queue.minutes, found or (None, None))
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
        try:
            names = Path(path).read_text(encoding="utf-8", errors="replace").split()
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
            raise ConfigError([Problem(where, problem, _STALE)]) from error
        slots = dict(Counter(names))
    else:
        where = f"LSB_MCPU_HOSTS={env['LSB_MCPU_HOSTS']!r}"
        words = env["LSB_MCPU_HOSTS"].split()
        counts = [word for word in words[1::2] if re.fullmatch("[1-9][0-9]{0,8}", word)]
        if 2 * len(counts) != len(words):
            problem = "is not a list of hosts, each with its slots"
            raise ConfigError([Problem(where, problem, _STALE)])
        slots = dict(zip(words[::2], map(int, counts), strict=True))
    for name in slots:
        if wrong := host_name_problem(name):
            raise ConfigError([Problem(where, f"{name[:60]!r} {wrong}", _STALE)])
    if not slots:
        raise ConfigError([Problem(where, "lists no host", _STALE)])
    return slots


def _argv_on(host: str) -> tuple[str, ...]:
    return ("blaunch", host)


SCHEDULER = LsfScheduler()
