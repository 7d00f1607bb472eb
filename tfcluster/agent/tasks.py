"""The tasks of this host, from `start` to `exited`.

Once a task has a process, it makes no difference whether it was executed or forked from
a warm interpreter. Also measures what running tasks use: memory, CPU time, GPUs.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from resource import struct_rusage

from tfcluster.agent import proc
from tfcluster.agent.children import OomCounter
from tfcluster.agent.events import ADDRESS, Claims, FrameSocket, listen
from tfcluster.agent.gpus import GpuUsage
from tfcluster.agent.layers import LayerRemover
from tfcluster.agent.output_capture import LogFile, OutputStream
from tfcluster.agent.proc import ProcessEntry
from tfcluster.agent.run_services import RunServices
from tfcluster.agent.signals import signal_number
from tfcluster.agent.spawn import (
    SpawnedProgram,
    SpawnError,
    adapted,
    environment,
    spawn,
    with_folders_first,
)
from tfcluster.agent.task import ATTEMPT, TASK, AgentTask
from tfcluster.agent.task_ports import TaskPorts
from tfcluster.agent.task_stop import Stopping
from tfcluster.base.light_dataclasses import dataclass
from tfcluster.protocol import local, messages, task_events
from tfcluster.protocol.frames import type_of
from tfcluster.protocol.messages import Usage
from tfcluster.protocol.requests import Start, StopRequest
from tfcluster.protocol.wire import Frame

CLOSE_LOOK_S = 0.02
_EXIT_REPORT_S = 4.0  # how long `exited` waits for a disk that hangs
_EVENTS = "TFCLUSTER_EVENTS"


@dataclass(frozen=True, slots=True)
class Ends:
    """The task's ends of its output pipe and its events socket."""

    output: int
    events: socket.socket

    def close(self) -> None:
        os.close(self.output)
        self.events.close()


class TaskTable:
    """All tasks that are not yet over."""

    def __init__(self, shared: RunServices) -> None:
        self._shared = shared
        self._tasks: list[AgentTask] = []
        self._oom = OomCounter()
        self._deaths = itertools.count()
        self._ports = TaskPorts(shared)
        self._layers = LayerRemover(shared, self._tasks)
        self._usage = UsageReports(shared, self._running)
        self._stopping = Stopping(shared, self._settled)

    def start(self, request: Start) -> None:
        """Execute a program. A failure is reported."""
        prepared = self.prepare(request)
        if prepared is None:
            return
        task, ends = prepared
        env = environment(self._shared.base, self.changes(task))
        env = environment(env, {_EVENTS: str(ends.events.fileno())})
        program = SpawnedProgram(request.argv, env, request.cwd)
        try:
            pid = spawn(program, ends.output, ends.events.fileno())
        except SpawnError as error:
            self.failed(task, str(error))
        else:
            self.begun(task, pid)
        finally:
            ends.close()

    def changes(self, task: AgentTask) -> Mapping[str, str | None]:
        """The changes to the agent's environment, including the task's marks."""
        request = task.request
        marks = {TASK: request.task, ATTEMPT: str(request.attempt)}
        env = {**request.env, **marks, ADDRESS: task.claims.address}
        base = self._shared.base
        return adapted(base, with_folders_first(base, env, request.prepend))

    def prepare(self, request: Start) -> tuple[AgentTask, Ends] | None:
        """A task with a log file but no process yet. A failure is reported."""
        if any(t.name == request.task and not t.reported for t in self._tasks):
            self.refuse(request, "it is already running")
            return None
        try:
            with ExitStack() as undo:
                listener = undo.enter_context(listen())
                read_end, write_end = os.pipe()
                undo.callback(os.close, read_end)
                undo.callback(os.close, write_end)
                ours, theirs = socket.socketpair()
                undo.pop_all()
        except OSError as error:
            self.refuse(request, f"no pipes: {error.strerror}")
            return None
        task = self._task(request, read_end, ours, listener)
        self._tasks.append(task)
        self._layers.starts(task)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        again = f"---- attempt {request.attempt}, {now} ----"
        self._shared.capture.add(task.stream, again if request.attempt else None)
        return task, Ends(write_end, theirs)

    def begun(self, task: AgentTask, pid: int) -> None:
        gone = ProcessEntry(pid, "", "Z", os.getpid(), pid, pid, 0)
        task.process = proc.read(pid) or gone
        self._usage.begin()
        self._shared.channel.send(messages.Started(*task.key, pid=pid))
        self._stopping.begun(task)
        self._ports.expect(task)
        self._shared.children.expect(pid, partial(self._ended, task))

    def failed(self, task: AgentTask, cause: str) -> None:
        task.reported = True
        task.events.finish()
        task.claims.finish()
        self.refuse(task.request, cause)
        self._stopping.abandoned(task)

    def refuse(self, request: Start, cause: str) -> None:
        failed = messages.Failed(request.task, request.attempt, cause)
        self._shared.channel.send(failed)

    def _ended(self, task: AgentTask, status: int, used: struct_rusage) -> None:
        task.status = status
        task.cpu_s = used.ru_utime + used.ru_stime
        task.max_rss_bytes = used.ru_maxrss * 1024
        task.death = next(self._deaths)
        task.seconds = self._shared.loop.now() - task.began
        by_kill = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        task.oom = by_kill and not task.killed and self._oom.struck()
        task.events.finish()
        task.claims.finish()
        self._shared.capture.drain(task.stream)
        self._shared.loop.later(_EXIT_REPORT_S, lambda: self._report(task))
        self._stopping.ended(task)

    def stop(self, request: StopRequest) -> None:
        wanted = set(request.tasks)
        tasks = [t for t in self._tasks if t.name in wanted]
        self._stopping.stop(tasks, signal_number(request.signal), request.grace_s)

    def stop_all(self, grace_s: float) -> None:
        self._stopping.stop(list(self._tasks), signal.SIGTERM, grace_s)

    def ask_stacks(self, names: Collection[str]) -> None:
        for task in self._running():
            if task.name in names:
                task.events.send(local.StacksMessage())
                task.claims.ask_stacks()

    @property
    def over(self) -> bool:
        return not self._tasks and self._layers.over

    def _running(self) -> Iterable[AgentTask]:
        return [t for t in self._tasks if t.running]

    def _task(
        self,
        request: Start,
        output: int,
        events: socket.socket,
        listener: socket.socket,
    ) -> AgentTask:
        loop, channel = self._shared.loop, self._shared.channel

        def say(event: Frame) -> None:
            kind = event["type"]
            if kind == type_of(task_events.ExchangedMessage):
                task.exchanged = True
            elif kind == type_of(task_events.ServerMessage):
                self._ports.serves(task, task_events.decode_server(event).port)
            else:
                channel.send_event(messages.Event(*task.key, event=event))

        def complain(cause: str) -> None:
            text = f"{request.task} wrote to its events socket: {cause}"
            channel.send(messages.Note(text))

        def drained(tail: list[str]) -> None:
            if task.status is not None:  # otherwise it could not be killed
                task.tail = tail
                self._report(task)

        def trouble(cause: str | None, lost_bytes: int) -> None:
            if cause is None:
                self._shared.note_log(task.name, cause, lost_bytes)
            else:
                channel.send(messages.LogError(*task.key, cause, lost_bytes))

        source = request.task, request.attempt
        task = AgentTask(
            request=request,
            stream=OutputStream(output, LogFile(request.log), source, drained, trouble),
            output=f"pipe:[{os.fstat(output).st_ino}]",
            events=FrameSocket(loop, events, say, complain),
            claims=Claims(loop, listener, say, complain),
            began=loop.now(),
        )
        return task

    def _report(self, task: AgentTask) -> None:
        if not task.reported:
            task.reported = True
            self._shared.channel.send(task.outcome(self._shared.loop.now()))
            self._forget(task)

    def _settled(self, task: AgentTask) -> None:
        self._shared.capture.drop(task.stream)
        if task.leftovers:
            self._shared.channel.send(messages.Swept(len(task.leftovers)))
        self._shared.channel.send(messages.Settled(*task.key))
        self._layers.settled(task)
        self._forget(task)

    def _forget(self, task: AgentTask) -> None:
        lost = task.settled and task.running  # it survived SIGKILL
        if task.settled and (task.reported or lost) and task in self._tasks:
            self._tasks.remove(task)


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
        if _VISIBLE in task.request.env:
            return task.request.env[_VISIBLE]
        inherited = self._shared.base.get(_VISIBLE.encode())
        return None if inherited is None else os.fsdecode(inherited)


def interval_s(count: int, cost_s: float) -> float:
    """Seconds until the next measurement after ``count``; the last took ``cost_s``."""
    wanted_s = min(_MAX_S, _FIRST_S * max(1.0, count / _FREQUENT))
    return max(wanted_s, cost_s / _COST_SHARE)
