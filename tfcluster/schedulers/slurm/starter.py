"""Starts agents with srun: in a step for each host, or in one step for many hosts.

A separate step for each host needs a request to slurmctld for each host. The processes
of one step for many hosts connect back to us.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial

from tfcluster.base.errors import StartError
from tfcluster.plan.model import Host, Interpreter
from tfcluster.schedulers.agent_bundle import agent_argv, send_agent
from tfcluster.schedulers.connect_back import CallerReception
from tfcluster.schedulers.process_channel import ConnectedChannel, ProcessChannel
from tfcluster.schedulers.slurm import controller
from tfcluster.schedulers.slurm.srun import (
    explained,
    reason,
    step_argv,
    words_about,
)
from tfcluster.schedulers.slurm.variables import SlurmNode
from tfcluster.schedulers.starting import AgentChannel

STEP_END_S = 6.0
"""How long Slurm may take to end the processes of a step."""
FIRST_S = 60.0
"""How long the first process may take to connect: after that, we assume that none can.
A site's prolog may take long."""
ALL_S = 120.0
"""How long the other processes may take, from the start of the step."""
_POLL_S = 0.1
_WORDS_BYTES = 1 << 16


class GroupStep:
    """A step, started at once; every method may be called from any thread."""

    def __init__(
        self,
        argv: Sequence[str],
        hosts: Sequence[str],
        env: Mapping[str, str],
        ports: range | None,
    ) -> None:
        """``argv`` is srun's command. Raises OSError or StartError if it cannot run."""
        self._lock = threading.Lock()
        self._used = set(hosts)
        """Hosts whose process will connect, or has a channel that is used."""
        self._reception = CallerReception(hosts, ports)
        self._began_s = time.monotonic()
        try:
            self._process = ProcessChannel("srun", argv, env=env)
        except StartError:
            self._reception.close()
            raise
        with contextlib.suppress(OSError):
            self._process.write(self._reception.program().encode() + b"\0")
        self._process.close()

    def channel(self, host: str) -> ConnectedChannel | None:
        """The channel to a process, once connected; None: it never will be."""
        caller = self._reception.caller(host, self._deadline_s, self._process.is_over)
        if caller is None:
            self.leave(host)
            return None
        return ConnectedChannel(
            caller.connection,
            partial(self._last_words, host, caller.task),
            partial(self.leave, host),
        )

    def _last_words(self, host: str, task: int, timeout_s: float) -> str:
        """What the process on ``host``, or srun about it, wrote to standard error.

        Waits until there is a reason: srun may pass it on after the connection ends,
        and after its own line that the process has exited.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            over = time.monotonic() >= until_s or self._process.is_over()
            words = words_about(self._process.last_words(_WORDS_BYTES), host, task)
            if (why := reason(words)) or over:
                return explained(words) or why or words.rpartition("\n")[2]
            self._process.is_over(_POLL_S)

    def leave(self, host: str) -> None:
        """Note that ``host`` needs the step no longer; the last one ends it."""
        with self._lock:
            last = self._used == {host}
            self._used.discard(host)
        if last:
            self._reception.close()
            if not self._process.is_over(STEP_END_S):
                self._process.terminate(STEP_END_S)

    def _deadline_s(self) -> float:
        return self._began_s + (ALL_S if self._reception.has_callers else FIRST_S)


MOST_ALONE = 16
"""Up to this many hosts get separate steps, whose pipes need no connection to us."""

_Kind = tuple[int | None, int | None, tuple[str, ...]]
"""What the processes of one step have in common: the job's component, the number of
GPUs to ask for, and the argv."""


class SrunStarter:
    """Starts agents on ``nodes`` of the job; ``env`` is the environment of steps."""

    def __init__(
        self,
        python: Interpreter,
        nodes: Mapping[str, SlurmNode],
        env: Mapping[str, str],
    ) -> None:
        self._python = python
        self._nodes = nodes
        self._env = env
        self._lock = threading.Lock()
        self._together: dict[_Kind, tuple[str, ...]] = {}
        self._steps: dict[_Kind, GroupStep | None] = {}

    def expect(self, hosts: Sequence[Host]) -> None:
        kinds: dict[_Kind, list[str]] = {}
        for host in hosts:
            kinds.setdefault(self._kind(host), []).append(host.name)
        with self._lock:
            for kind, names in kinds.items():
                if len(names) > MOST_ALONE and kind not in self._together:
                    self._together[kind] = tuple(names)

    def start_agent(self, host: Host) -> AgentChannel:
        """Raises StartError."""
        channel = self._from_group(host) or self._alone(host)
        send_agent(channel, host)
        return channel

    def _kind(self, host: Host) -> _Kind:
        argv = agent_argv(host.python or self._python)
        node = self._nodes.get(host.name)
        return (None, None, argv) if node is None else (node.group, node.gpus, argv)

    def _alone(self, host: Host) -> AgentChannel:
        group, gpus, argv = self._kind(host)
        argv = step_argv([host.name], argv, group=group, gpus=gpus)
        # srun forwards SIGTERM to the task, whose guard then sweeps, while repeated
        # SIGINT would end the step at once. Only after that, srun itself is killed.
        return ProcessChannel(
            host.name,
            argv,
            env=self._env,
            end_s=STEP_END_S,
            explain=lambda words, _: explained(words),
        )

    def _from_group(self, host: Host) -> AgentChannel | None:
        """The host's process in a step for many; None: the host needs a separate step.

        It needs one when the step fails as a whole, because of another host or because
        processes cannot connect to us, and when the host's agent is started again.
        """
        kind = self._kind(host)
        with self._lock:
            names = self._together.get(kind, ())
            if host.name not in names:
                return None
            # If this host needs another agent later, it gets a separate step.
            self._together[kind] = tuple(name for name in names if name != host.name)
            if kind not in self._steps:
                self._steps[kind] = self._begin(kind, names)
            step = self._steps[kind]
        return None if step is None else step.channel(host.name)

    def _begin(self, kind: _Kind, names: Sequence[str]) -> GroupStep | None:
        group, gpus, argv = kind
        ports = controller.srun_ports(controller.config(self._env))
        argv = step_argv(names, argv, group=group, gpus=gpus)
        with contextlib.suppress(OSError, StartError):
            return GroupStep(argv, names, self._env, ports)
        return None
