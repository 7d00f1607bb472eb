"""Ends tasks: signals the whole tree, kills it after the grace, ends its leftovers.

``members`` tells it which processes belong to a task.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from functools import partial

from tfcluster.agent import proc
from tfcluster.agent.proc import ProcessEntry, Table
from tfcluster.agent.run_services import RunServices
from tfcluster.agent.signals import send, send_group
from tfcluster.agent.sweep import kill_until_gone
from tfcluster.agent.task import AgentTask, members
from tfcluster.protocol.messages import Unkillable

_SETTLE_S = 0.1  # helpers that end within this time after their task are not leftovers
_LEFTOVER_TERM_S = 1.0
_LOOK_S = 0.1


class Stopping:
    """Stops tasks; ``settled`` is called once for each, when all of it has ended."""

    def __init__(
        self, shared: RunServices, settled: Callable[[AgentTask], None]
    ) -> None:
        self._shared = shared
        self._loop = shared.loop
        self._settled = settled
        self._ended: list[AgentTask] = []

    def stop(self, tasks: Iterable[AgentTask], signum: int, grace_s: float) -> None:
        """Signal each process once (SIGUSR1: only its handlers), SIGKILL later."""
        wanted = list(tasks)
        table = proc.snapshot() if wanted else {}
        for task in wanted:
            if task.status is None:
                task.stopped = True
            if grace_s > 0 and task.process is None:
                task.stop_signal = signum
            elif grace_s > 0 and signum not in task.signals:
                if signum == signal.SIGUSR1 and self._warned(task, table, grace_s):
                    task.signals.add(signum)
                elif signum == signal.SIGUSR1:
                    self._signal(task, table, signal.SIGTERM)
                else:
                    self._signal(task, table, signum)
            self._kill_in(task, grace_s)

    def begun(self, task: AgentTask) -> None:
        """Deliver the signal that was requested before the task had a process."""
        if task.stop_signal is not None:
            warned = task.stop_signal == signal.SIGUSR1  # it cannot have a handler yet
            signum = signal.SIGTERM if warned else task.stop_signal
            self._signal(task, proc.snapshot(), signum)

    def ended(self, task: AgentTask) -> None:
        """End what the task's reaped process left, after a moment to exit."""
        if not self._ended:
            self._loop.post(self._look_behind)
        self._ended.append(task)

    def _look_behind(self) -> None:
        ended, self._ended = self._ended, []
        table = proc.snapshot()
        for task in ended:
            if self._members(task, table):
                self._loop.later(_SETTLE_S, partial(self._end_leftovers, task))
            else:
                self._settle(task)

    def abandoned(self, task: AgentTask) -> None:
        """Kill the task's process, if there is one: it may not have been forked."""
        self._kill_in(task, 0.0)

    def _members(
        self, task: AgentTask, table: Table | None = None
    ) -> list[ProcessEntry]:
        table = proc.snapshot() if table is None else table
        others = {*self._shared.children.expected} - {task.process_id}
        return members(table, os.getpid(), task.identity(), others)

    def _signal(self, task: AgentTask, table: Table, signum: int) -> None:
        task.signals.add(signum)
        leader = task.process_id if task.running else None
        tree = self._members(task, table)
        for number in (signum, signal.SIGCONT):  # wakes stopped processes
            if leader is not None:
                # The whole group at once: none of its processes can fork in between.
                send_group(leader, number)
            for process in tree:
                if leader is None or process.group != leader:
                    send(process, number)

    def _warned(self, task: AgentTask, table: Table, grace_s: float) -> bool:
        """SIGUSR1, later SIGTERM to the processes that handle it; False: none does."""
        if not self._send_to_handlers(self._members(task, table), signal.SIGUSR1):
            return False

        def terminate() -> None:
            if not task.settled and signal.SIGTERM not in task.signals:
                task.signals.add(signal.SIGTERM)
                self._send_to_handlers(self._members(task), signal.SIGTERM)

        self._loop.later(grace_s / 2, terminate)
        return True

    def _send_to_handlers(self, tree: Iterable[ProcessEntry], signum: int) -> bool:
        handling = [process for process in tree if proc.catches(process.pid, signum)]
        for process in handling:
            send(process, signum)
            send(process, signal.SIGCONT)
        return bool(handling)

    def _kill_in(self, task: AgentTask, delay_s: float) -> None:
        at = self._loop.now() + delay_s
        if task.kill_at is not None and task.kill_at <= at:
            return
        if task.kill_timer is not None:
            task.kill_timer.cancel()
        task.kill_at = at
        task.kill_timer = self._loop.later(delay_s, lambda: self._kill(task))

    def _kill(self, task: AgentTask) -> None:
        if task.settled:
            return
        task.killed = True

        def find() -> list[ProcessEntry]:
            # A leader that has ended but has not been reaped yet counts as gone.
            alive = self._members(task)
            if task.status is not None:
                task.leftovers.update(process.pid for process in alive)
            return alive

        def done(_killed: list[ProcessEntry], left: list[ProcessEntry]) -> None:
            if left:
                pids = tuple(process.pid for process in left)
                self._shared.channel.send(Unkillable(pids))
            if left or task.status is not None or task.process is None:
                self._settle(task)

        kill_until_gone(self._loop, find, done)

    def _end_leftovers(self, task: AgentTask) -> None:
        if task.settled:
            return
        alive = self._members(task)
        if not alive:
            self._settle(task)
            return
        if task.kill_at is None:
            for process in alive:
                send(process, signal.SIGTERM)
                send(process, signal.SIGCONT)
            task.leftovers.update(process.pid for process in alive)
            self._kill_in(task, _LEFTOVER_TERM_S)
        self._loop.later(_LOOK_S, lambda: self._end_leftovers(task))

    def _settle(self, task: AgentTask) -> None:
        if not task.settled:
            task.settled = True
            if task.kill_timer is not None:
                task.kill_timer.cancel()
            self._settled(task)
