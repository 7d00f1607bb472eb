"""Grid Engine: the hosts of a job's parallel environment, and ``qrsh -inherit``.

Works inside a job; ``submit`` submits jobs. The host on which the job's script runs
needs no qrsh: its agent is a child process, as with the backend ``local``.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfcluster.errors import ExitCode, StartError
from tfcluster.model import Allocation, Description, Host, Interpreter
from tfcluster.schedulers import gpus, process_channel
from tfcluster.schedulers.agent_bundle import agent_argv, parcel
from tfcluster.schedulers.base import BatchScheduler, gpus_of_all, placeholders
from tfcluster.schedulers.own_host import is_one_of, own_names
from tfcluster.schedulers.process_channel import ProcessChannel
from tfcluster.schedulers.sge import queue
from tfcluster.schedulers.sge.job import granted_slots, is_inside
from tfcluster.schedulers.sge.programs import find_program
from tfcluster.schedulers.sge.qmaster import Qmaster
from tfcluster.schedulers.sge.qrsh import QrshChannel, meaning, qrsh_argv, shielded
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
GPU_VARIABLES = (*gpus.CUDA, "SGE_HGR_gpu", "SGV_HGR_gpu", "SGE_GPU")
"""Variables that name GPUs; the first one that is set counts."""


class SgeScheduler(BatchScheduler):
    """The granted hosts and slots, in Grid Engine's order."""

    name = "sge"
    title = "Grid Engine"
    settings = SgeSettings
    mistakes = staticmethod(contradictions)
    directives = staticmethod(directives)
    submit = staticmethod(queue.submit)
    state = staticmethod(queue.state)
    is_inside = staticmethod(is_inside)
    options = OPTIONS
    launcher = "qrsh"
    example = EXAMPLE
    synonyms = SYNONYMS
    advice = ADVICE
    submit_command = "qsub"
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

    def cancel_argvs(self, job: str) -> tuple[tuple[str, ...], ...]:
        # With -notify, the launcher gets SIGUSR2 first.
        return (self.kill_argv(job),)

    def kill_argv(self, job: str) -> tuple[str, ...]:
        # There is no faster way: a job that is being deleted gets no further signal.
        return ("qdel", job)

    def allocate(self, description: Description, env: Mapping[str, str]) -> Allocation:
        own = own_names(env)
        slots = granted_slots(env)
        others = [name for name in slots if not is_one_of(name, own)]
        devices = dict.fromkeys(slots, gpus.given(env, GPU_VARIABLES)) | dict.fromkeys(
            others
        )
        if others and any(group.gpus for group in description.tasks.values()):
            devices |= ask_gpus(find_program("qrsh", env), others, env)
        hosts = [
            Host(name=name, slots=count, gpus=devices[name])
            for name, count in slots.items()
        ]
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
        qmaster = Qmaster(env)
        job = qmaster.job()
        notice_s = qmaster.notice_s() if job is not None and job.notify else None
        return None if notice_s is None else max(1.0, notice_s - _SWEEP_S)

    def why_ending(self, env: Mapping[str, str]) -> ExitCode | None:
        """Ask the qmaster: qdel, the time limit and `qmod -rj` send the same signal."""
        job = Qmaster(env).job()
        if job is None:
            return None
        if job.is_rescheduled(_launched_s()):
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
    shell = ("/bin/sh", "-c", gpus.question(GPU_VARIABLES))
    return gpus.ask(
        hosts, lambda host: qrsh_argv(qrsh, host, shell), env, GPU_VARIABLES, meaning
    )


def _launched_s() -> float:
    """The Unix time when this process was started."""
    import psutil  # imported here: most launches end by themselves

    return float(psutil.Process().create_time())


@dataclass(frozen=True, slots=True, kw_only=True)
class _JobStarter:
    """Starts agents on the hosts of this job."""

    own: tuple[str, ...]
    """The names of this host."""
    qrsh: str
    python: Interpreter

    def start_agent(self, host: Host) -> AgentChannel:
        if is_one_of(host.name, self.own):
            return ProcessChannel.start(
                host.name, shielded(process_channel.agent_argv())
            )
        argv = qrsh_argv(self.qrsh, host.name, agent_argv(host.python or self.python))
        channel = QrshChannel.start(host.name, argv)
        channel.wait_until_ready(host.name)
        try:
            channel.write(parcel().data)
        except OSError as error:
            said = channel.diagnosis() or str(error)
            raise StartError(
                f"{host.name}: the agent exited immediately: {said}"
            ) from error
        return channel


SCHEDULER = SgeScheduler()
