"""Puts together the tasks, warm interpreters, output and children of one run.

Dispatches checked requests of the launcher.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from tfcluster.agent.channel import Channel
from tfcluster.agent.children import Children
from tfcluster.agent.console_lines import ConsoleQueue
from tfcluster.agent.loop import Loop
from tfcluster.agent.output_capture import OutputCapture
from tfcluster.agent.preparation import Preparation
from tfcluster.agent.run_services import RunServices
from tfcluster.agent.signals import adopt_orphans
from tfcluster.agent.spawn import environment
from tfcluster.agent.sweep import AGENT, RUN, agent_mark
from tfcluster.agent.tasks import TaskTable
from tfcluster.agent.warm_interpreters import WarmInterpreters
from tfcluster.protocol import requests


class AgentRun:
    """Everything in a run that has processes."""

    def __init__(
        self,
        loop: Loop,
        channel: Channel,
        backlog: ConsoleQueue,
        run: str,
        fault: Callable[[str], None],
    ) -> None:
        self.adopts_orphans = adopt_orphans()
        self.capture = OutputCapture(backlog, loop.post, channel.flush, fault)
        marks = {RUN: run, AGENT: agent_mark(os.getpid())}
        self._children = Children()
        base = dict(environment(os.environb, marks))
        shared = RunServices(loop, channel, self.capture, self._children, base)
        self._tasks = TaskTable(shared)
        self._warmer = WarmInterpreters(shared, self._tasks)
        self._preparation = Preparation(shared)

    def obey(self, request: requests.Request, *, closing: bool) -> None:
        match request:
            case requests.Start() if closing:
                self._tasks.refuse(request, "the agent is closing")
            case requests.Start(warm=None):
                self._tasks.start(request)
            case requests.Start():
                self._warmer.fork(request)
            case requests.Warm():
                if not closing:
                    self._warmer.start(request)
            case requests.Prepare():
                if not closing:
                    self._preparation.start(request)
            case requests.StopRequest():
                self._tasks.stop(request)
            case requests.StacksRequest(names):
                self._tasks.ask_stacks(names)

    def reap(self) -> None:
        """Reap all children that have ended."""
        self._children.reap()

    def stop_all(self, grace_s: float) -> None:
        self._preparation.close()
        self._warmer.close()
        self._tasks.stop_all(grace_s)

    @property
    def over(self) -> bool:
        """Whether no task and no interpreter is left; the rest can be swept."""
        return self._tasks.over and self._warmer.over and self._preparation.over
