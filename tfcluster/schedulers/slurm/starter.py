"""Starts agents with srun: in a step for each host, or in one step for many hosts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence

from tfcluster.model import Host, Interpreter
from tfcluster.schedulers.agent_bundle import agent_argv, send_agent
from tfcluster.schedulers.slurm.controller import Controller
from tfcluster.schedulers.slurm.group_step import GroupStep, StepChannel
from tfcluster.schedulers.slurm.srun import group_argv, srun_argv
from tfcluster.schedulers.slurm.variables import SlurmNode
from tfcluster.schedulers.starting import AgentChannel

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
        argv = srun_argv(host.name, argv, group=group, gpus=gpus)
        return StepChannel.start(host.name, argv, env=self._env)

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
        ports = Controller(self._env).srun_ports()
        argv = group_argv(names, argv, group=group, gpus=gpus)
        with contextlib.suppress(OSError):
            return GroupStep(argv, names, self._env, ports)
        return None
