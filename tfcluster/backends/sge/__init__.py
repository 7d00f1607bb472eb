"""Grid Engine: the hosts of a job's parallel environment, and ``qrsh -inherit``.

Works inside a job; ``submit`` submits jobs. The host on which the job's script runs
needs no qrsh: its agent is a child process, as with the backend ``local``.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from tfcluster.backends import local
from tfcluster.backends.agent_bundle import agent_argv, parcel
from tfcluster.backends.base import Backend, Channel, Starter
from tfcluster.backends.local import ProcessChannel
from tfcluster.backends.sge import gpus
from tfcluster.backends.sge.job import granted_slots, is_one_of, own_names
from tfcluster.backends.sge.programs import find_program
from tfcluster.backends.sge.qmaster import Qmaster
from tfcluster.backends.sge.qrsh import QrshChannel, qrsh_argv, shielded
from tfcluster.errors import ExitCode, StartError
from tfcluster.model import Allocation, Description, Host, Interpreter

_SWEEP_S = 5.0


class SgeBackend:
    """The granted hosts and slots, in Grid Engine's order."""

    def allocate(self, description: Description, env: Mapping[str, str]) -> Allocation:
        own = own_names(env)
        slots = granted_slots(env)
        others = [name for name in slots if not is_one_of(name, own)]
        devices = dict.fromkeys(slots, gpus.given(env)) | dict.fromkeys(others)
        if others and any(group.gpus for group in description.tasks.values()):
            devices |= gpus.ask(find_program("qrsh", env), others, env)
        return Allocation(
            hosts=tuple(
                Host(name=name, slots=count, gpus=devices[name])
                for name, count in slots.items()
            )
        )

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
        words = (*description.sge.resources, *description.sge.options)
        limited = any(word.startswith("s_rt") for word in words)
        return frozenset() if limited else frozenset({signal.SIGUSR1})


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

    def start_agent(self, host: Host) -> Channel:
        if is_one_of(host.name, self.own):
            return ProcessChannel.start(host.name, shielded(local.agent_argv()))
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


BACKEND: Backend = SgeBackend()
