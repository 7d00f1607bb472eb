"""PBS: OpenPBS, PBS Professional, Torque. Hosts from PBS_NODEFILE; TM starts agents.

The agent on the host of the job's script is a child process, as with ``local``.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tfcluster.errors import ConfigError, ExitCode, Problem, StartError
from tfcluster.host_patterns import host_name_problem
from tfcluster.model import Allocation, Description, Host
from tfcluster.schedulers import gpus
from tfcluster.schedulers.base import BatchScheduler, SchedulerError, placeholders
from tfcluster.schedulers.file_starter import FileStarter, ask_gpus
from tfcluster.schedulers.own_host import is_one_of, own_names
from tfcluster.schedulers.pbs import queue
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
from tfcluster.schedulers.queries import asker
from tfcluster.schedulers.times import seconds

_ASK_S = 3.0
_SWEEP_S = 5.0
_KILL_DELAY_S = 10.0
"""The queue attribute kill_delay, if a queue does not set it."""
_STALE = "start a new shell, or `unset PBS_JOBID PBS_NODEFILE`, outside of a job"


class PbsScheduler(BatchScheduler):
    """A host is a line of PBS_NODEFILE; it has as many slots as lines."""

    name = "pbs"
    title = "PBS"
    settings = PbsSettings
    mistakes = staticmethod(mistakes)
    directives = staticmethod(directives)
    submit = staticmethod(queue.submit)
    state = staticmethod(queue.state)
    options = OPTIONS
    launcher = "tm"
    example = EXAMPLE
    synonyms = SYNONYMS
    advice = ADVICE
    submit_command = "qsub"
    why_no_requeue = "PBS starts no job again at its time limit"
    without_gpus = "the job has none: ask for them: `-l select=N:ngpus=M` of qsub"

    def allocate(self, description: Description, env: Mapping[str, str]) -> Allocation:
        lines, own = granted(env), own_names(env)
        slots = Counter(lines)
        devices = dict.fromkeys(slots, gpus.given(env))
        others = [name for name in slots if not is_one_of(name, own)]
        devices |= dict.fromkeys(others)
        if others and any(group.gpus for group in description.tasks.values()):
            devices |= ask_gpus(others, _argv_on(env, lines), env)
        asked = self.settings_in(description).tasks_per_node
        hosts = [
            Host(name=name, slots=asked or count, gpus=devices[name])
            for name, count in slots.items()
        ]
        return self.granted(description, hosts)

    def starter(self, description: Description, env: Mapping[str, str]) -> FileStarter:
        argv_on = _argv_on(env, granted(env))
        return FileStarter(description.python, own_names(env), argv_on, env)

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

    def cancel_argvs(self, job: str) -> tuple[tuple[str, ...], ...]:
        # SIGTERM, and after kill_delay SIGKILL.
        return (self.kill_argv(job),)

    def kill_argv(self, job: str) -> tuple[str, ...]:
        return ("qdel", job)

    def longest_grace_s(self, env: Mapping[str, str]) -> float | None:
        """The queue's kill_delay, less the time of a sweep."""
        name = env.get("PBS_QUEUE", "")
        answer = asker(env, _ASK_S)(("qstat", "-Q", "-f", "-F", "json", name))
        facts = (queue.section(answer, "Queue") or {}).get(name)
        if facts is None:
            return None
        delay = str(facts.get("kill_delay", ""))
        delay_s = float(delay) if delay.isdecimal() else _KILL_DELAY_S
        return max(1.0, delay_s - _SWEEP_S)

    def why_ending(self, env: Mapping[str, str]) -> ExitCode | None:
        """qdel and the time limit send the same signal: compare the job's times."""
        try:
            facts = queue.job_facts(env.get("PBS_JOBID", ""), asker(env, _ASK_S))
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
    path = env.get("PBS_NODEFILE")
    if not path or not env.get("PBS_JOBID"):
        hint = "`tfcluster submit`, or launch in a job of qsub"
        raise StartError("not inside a PBS job", hint=hint)
    where = f"PBS_NODEFILE={path!r}"
    try:
        names = Path(path).read_text(encoding="utf-8", errors="replace").split()
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise ConfigError([Problem(where, problem, _STALE)]) from error
    for name in names:
        if wrong := host_name_problem(name):
            raise ConfigError([Problem(where, f"{name[:60]!r} {wrong}", _STALE)])
    if not names:
        raise ConfigError([Problem(where, "lists no host", _STALE)])
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
    return seconds(str(text)) if text else None


SCHEDULER = PbsScheduler()
