"""Measures what running tasks use: memory, CPU time, GPUs. Independent of training.

The interval between measurements grows from one second to ten. It is longer on a host
with so many processes that a measurement takes long.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence

from tfcluster.agent import proc
from tfcluster.agent.gpus import GpuUsage
from tfcluster.agent.proc import ProcessEntry
from tfcluster.agent.run_services import RunServices
from tfcluster.agent.task import AgentTask
from tfcluster.protocol.messages import Usage

_FIRST_S = 1.0  # between two measurements of what tasks use, at first
_MAX_S = 10.0  # and later
_FREQUENT = 300  # measurements; after twice as many, the interval doubles, and so on
_COST_SHARE = 0.005  # of one CPU
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class UsageReports:
    """Sends the usage of every running task, again and again."""

    def __init__(
        self, shared: RunServices, running: Callable[[], Iterable[AgentTask]]
    ) -> None:
        self._shared = shared
        self._running = running
        self._gpus = GpuUsage()
        self._count = 0
        self._due = False

    def begin(self) -> None:
        """Measure from now on, as long as any task runs."""
        if not self._due:
            self._due = True
            self._shared.loop.later(_FIRST_S, self._measure)

    def _measure(self) -> None:
        self._due = False
        tasks = list(self._running())
        if not tasks:
            return
        self._gpus.start()
        loop = self._shared.loop
        began = loop.now()
        table = proc.snapshot()
        for task in tasks:
            leader = task.process_id
            if leader is not None:
                pids = proc.family(table, [leader], [leader])
                usage = self._usage(task, [table[pid] for pid in pids])
                if usage.rss_bytes:  # otherwise all have ended, and wait to be reaped
                    self._shared.channel.send_event(usage)
        self._count += 1
        self._due = True
        loop.later(interval_s(self._count, loop.now() - began), self._measure)

    def _usage(self, task: AgentTask, processes: Sequence[ProcessEntry]) -> Usage:
        return Usage(
            *task.key,
            rss_bytes=sum(process.rss_bytes for process in processes),
            cpu_s=round(sum(process.cpu_s for process in processes), 2),
            processes=len(processes),
            gpus=tuple(self._gpus.of(self._visible(task))),
        )

    def _visible(self, task: AgentTask) -> str | None:
        """The task's CUDA_VISIBLE_DEVICES; None if it is not set."""
        if _VISIBLE in task.request.env:
            return task.request.env[_VISIBLE]
        inherited = self._shared.base.get(_VISIBLE.encode())
        return None if inherited is None else os.fsdecode(inherited)


def interval_s(count: int, cost_s: float) -> float:
    """Seconds until the next measurement after ``count``; the last took ``cost_s``."""
    wanted_s = min(_MAX_S, _FIRST_S * max(1.0, count / _FREQUENT))
    return max(wanted_s, cost_s / _COST_SHARE)
