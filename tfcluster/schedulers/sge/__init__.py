"""Grid Engine: the hosts of a job's parallel environment, and ``qrsh -inherit``.

Works inside a job; ``submit`` submits jobs. The host on which the job's script runs
needs no qrsh: its agent is a child process, as with the backend ``local``.
"""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfcluster.base.errors import ConfigError, ExitCode, Problem
from tfcluster.plan.host_patterns import host_name_problem
from tfcluster.plan.model import Allocation, Description, Host, Interpreter
from tfcluster.schedulers import process_channel
from tfcluster.schedulers.agent_bundle import agent_argv, send_agent
from tfcluster.schedulers.base import BatchScheduler, gpus_of_all, placeholders
from tfcluster.schedulers.job_hosts import (
    CUDA,
    gpu_question,
    gpus_on,
    host_file,
    hosts_with_gpus,
    is_one_of,
    own_names,
)
from tfcluster.schedulers.process_channel import ProcessChannel
from tfcluster.schedulers.sge import queue
from tfcluster.schedulers.sge.qrsh import (
    meaning,
    qrsh_argv,
    shielded,
    start_process,
)
from tfcluster.schedulers.sge.queue import find_program
from tfcluster.schedulers.sge.settings import (
    ADVICE,
    EXAMPLE,
    OPTIONS,
    SYNONYMS,
    SgeSettings,
    contradictions,
    directives,
    sge_slots,
)
from tfcluster.schedulers.starting import AgentChannel, Starter

_SWEEP_S = 5.0
_COUNT = re.compile("[0-9]{1,9}")
_STALE = (
    "start a new shell, or `unset JOB_ID SGE_TASK_ID PE_HOSTFILE`, if this shell is "
    "not inside a job"
)
GPU_VARIABLES = (*CUDA, "SGE_HGR_gpu", "SGV_HGR_gpu", "SGE_GPU")
"""Variables that name GPUs; the first one that is set counts."""


class SgeScheduler(BatchScheduler):
    """The granted hosts and slots, in Grid Engine's order."""

    name = "sge"
    title = "Grid Engine"
    settings = SgeSettings
    mistakes = staticmethod(contradictions)
    directives = staticmethod(directives)
    state = staticmethod(queue.state)
    options = OPTIONS
    launcher = "qrsh"
    example = EXAMPLE
    synonyms = SYNONYMS
    advice = ADVICE
    submit_command = "qsub"
    job_id = queue.JOB_ID
    prefix = queue.PREFIX
    hints = queue.HINTS
    why_no_requeue = "Grid Engine does not start a job on several hosts again"
    without_gpus = (
        "the job has none: ask for them with -l, as `-l gpu=1`; `qconf -sc` has the "
        "site's name"
    )

    def more_slots(self, tasks: int, hosts: int) -> str:
        return f"ask for them: `-pe NAME {tasks}` of qsub"

    def expected(self, description: Description) -> Allocation:
        slots = sge_slots(description, self.settings_in(description))
        hosts = placeholders(1, slots, gpus_of_all(description))
        return self.granted(description, hosts)

    def is_inside(self, env: Mapping[str, str]) -> bool:
        """Whether this is the environment of a job's script.

        ``JOB_ID`` alone does not suffice: other programs than Grid Engine set it, too.
        """
        return "JOB_ID" in env and "SGE_TASK_ID" in env

    def submit_argv(self, script: Path) -> tuple[str, ...]:
        return ("qsub", "-terse", str(script))

    def cancel_argvs(self, job: str) -> tuple[tuple[str, ...], ...]:
        # With -notify, the launcher gets SIGUSR2 first.
        return (self.kill_argv(job),)

    def kill_argv(self, job: str) -> tuple[str, ...]:
        # There is no faster way: a job that is being deleted gets no further signal.
        return ("qdel", job)

    def allocate(self, description: Description, env: Mapping[str, str]) -> Allocation:
        hosts = hosts_with_gpus(
            granted_slots(env),
            description,
            env,
            lambda others: ask_gpus(find_program("qrsh", env), others, env),
            GPU_VARIABLES,
        )
        return self.granted(description, hosts)

    def starter(self, description: Description, env: Mapping[str, str]) -> Starter:
        own = own_names(env)
        alone = all(is_one_of(name, own) for name in granted_slots(env))
        return _JobStarter(
            own=own,
            qrsh="" if alone else find_program("qrsh", env),
            python=description.python,
        )

    def longest_grace_s(self, env: Mapping[str, str]) -> float | None:
        """The notice that the queue gives before SIGKILL, less the time of a sweep."""
        job = queue.own_job(env)
        notice_s = queue.notice_s(env) if job is not None and job.notify else None
        return None if notice_s is None else max(1.0, notice_s - _SWEEP_S)

    def why_ending(self, env: Mapping[str, str]) -> ExitCode | None:
        """Ask the qmaster: qdel, the time limit and `qmod -rj` send the same signal."""
        job = queue.own_job(env)
        if job is None:
            return None
        import psutil  # imported here: most launches end by themselves

        if job.is_rescheduled(float(psutil.Process().create_time())):
            return ExitCode.PREEMPTED
        return ExitCode.TIME_LIMIT if job.is_over_time(time.time()) else None

    def array_index(self, env: Mapping[str, str]) -> str | None:
        index = env.get("SGE_TASK_ID", "undefined")
        return None if index == "undefined" else index

    def harmless_signals(self, description: Description) -> frozenset[signal.Signals]:
        """SIGUSR1, which -notify sends before a suspension, unless s_rt is set, which
        sends it at its limit."""
        sge = self.settings_in(description)
        words = (*sge.resources, *sge.options)
        limited = any(word.startswith("s_rt") for word in words)
        return frozenset() if limited else frozenset({signal.SIGUSR1})


def ask_gpus(
    qrsh: str, hosts: Sequence[str], env: Mapping[str, str]
) -> dict[str, tuple[str, ...] | None]:
    """The job's GPUs on other hosts, from a qrsh task on each. Raises StartError."""
    shell = ("/bin/sh", "-c", gpu_question(GPU_VARIABLES))
    return gpus_on(
        hosts, lambda host: qrsh_argv(qrsh, host, shell), env, GPU_VARIABLES, meaning
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobStarter:
    """Starts agents on the hosts of this job."""

    own: tuple[str, ...]
    """The names of this host."""
    qrsh: str
    python: Interpreter

    def start_agent(self, host: Host) -> AgentChannel:
        if is_one_of(host.name, self.own):
            return ProcessChannel(host.name, shielded(process_channel.agent_argv()))
        argv = qrsh_argv(self.qrsh, host.name, agent_argv(host.python or self.python))
        channel = start_process(host.name, argv)
        send_agent(channel, host)
        return channel


def slots_by_host(where: str, text: str) -> dict[str, int]:
    """Host -> slots, in the file's order, with names exactly as in the file.

    A line is ``HOST SLOTS [QUEUE@HOST [PROCESSORS]]`` (sge_pe(5)): the queue and the
    processors (``UNDEFINED`` or ``0,1:0,2``) are not needed here, and some variants
    leave them out. A host with slots in several queues has a line for each, so slots
    are summed. Raises ConfigError, about ``where``, for another text.
    """
    slots: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words:
            continue
        shown = f"line {number}: {line[:80]!r}"
        if len(words) < 2:
            problem = f"{shown} has too few fields: expected HOST SLOTS"
        elif host_name_problem(words[0]):
            problem = f"{shown} does not begin with a host name"
        elif not _COUNT.fullmatch(words[1]):
            problem = f"{shown}: the second field is not a number of slots"
        else:
            slots[words[0]] += int(words[1])
            continue
        raise ConfigError([Problem(where, problem, _STALE)])
    granted = {name: count for name, count in slots.items() if count}
    if not granted:
        raise ConfigError([Problem(where, "lists no host with slots", _STALE)])
    return granted


def granted_slots(env: Mapping[str, str]) -> dict[str, int]:
    """Host -> slots, in the scheduler's order.

    Raises StartError outside of a job, ConfigError if the host file is unusable.
    """
    SCHEDULER.require_inside(env)
    if path := env.get("PE_HOSTFILE"):
        text = host_file("PE_HOSTFILE", path, _STALE)
        return slots_by_host(f"PE_HOSTFILE={path!r}", text)
    if env.get("PE"):
        problem = f"is not set, but the job is a parallel one: PE={env['PE']}"
        raise ConfigError([Problem("PE_HOSTFILE", problem, _STALE)])
    # Submitted without -pe: one slot on one host.
    return {own_names(env)[0]: 1}


SCHEDULER = SgeScheduler()
