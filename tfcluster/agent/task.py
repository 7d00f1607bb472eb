"""The state of one task: the request, what became of it, and which processes it has."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping

from tfcluster.agent import proc
from tfcluster.agent.events import Claims, FrameSocket
from tfcluster.agent.loop import Timer
from tfcluster.agent.output_capture import OutputStream
from tfcluster.agent.proc import ProcessEntry, Table
from tfcluster.agent.signals import signal_name
from tfcluster.base.light_dataclasses import dataclass, field
from tfcluster.protocol.messages import Exited
from tfcluster.protocol.requests import Start

TASK = "TFCLUSTER_TASK"
ATTEMPT = "TFCLUSTER_ATTEMPT"


@dataclass(frozen=True, slots=True)
class Identity:
    """What identifies a task's processes; ``leader`` is None before there is one."""

    task: str
    attempt: int
    leader: int | None
    output: str  # its pipe as /proc shows it: pipe:[INODE]
    waited_for: bool  # the leader was reaped, so its pid may have been reused


def members(
    table: Table,
    agent: int,
    identity: Identity,
    others: Collection[int] = (),
    environ: Callable[[int], Mapping[str, str]] = proc.environ,
    descriptors: Callable[[int], Mapping[int, str]] = proc.descriptors,
) -> list[ProcessEntry]:
    """The task's live processes; ``others`` are the leaders of other tasks.

    Only descendants of the agent, never a foreign process with a reused pid. An orphan
    is the task's by its initial environment, or if it holds the task's output pipe.
    """
    descendants = proc.family(table, [agent]) - {agent}
    of_other_tasks = proc.family(table, others, others)
    leader = set() if identity.leader is None else {identity.leader}
    roots = set() if identity.waited_for else set(leader)
    for pid in descendants - of_other_tasks:
        if table[pid].ppid != agent or pid == identity.leader:
            continue
        marks = environ(pid)
        names = (marks.get(TASK), marks.get(ATTEMPT))
        if names == (identity.task, str(identity.attempt)) or (
            identity.output in descriptors(pid).values()
        ):
            roots.add(pid)
    processes = proc.family(table, roots, leader)
    return [
        table[pid]
        for pid in processes & descendants - of_other_tasks
        if not table[pid].dead
    ]


@dataclass(eq=False)
class AgentTask:
    request: Start
    stream: OutputStream
    output: str  # the stream's pipe, as /proc shows it: pipe:[INODE]
    events: FrameSocket
    claims: Claims
    began: float
    process: ProcessEntry | None = None
    status: int | None = None  # as in waitpid(2)
    seconds: float = 0.0
    death: int = 0  # its number among the ends of all tasks on this host
    oom: bool = False
    cpu_s: float = 0.0  # of its own process, once it has ended
    max_rss_bytes: int = 0
    tail: list[str] | None = None
    stopped: bool = False  # we told it to end
    exchanged: bool = False  # it reported an exchange with other tasks
    stop_signal: int | None = None  # requested before there was a process
    signals: set[int] = field(default_factory=set)  # the signals sent to it
    killed: bool = False
    kill_at: float | None = None
    kill_timer: Timer | None = None
    leftovers: set[int] = field(default_factory=set)  # pids
    reported: bool = False
    settled: bool = False  # no process of it is left, or we gave up

    @property
    def name(self) -> str:
        return self.request.task

    @property
    def key(self) -> tuple[str, int]:
        """The first two fields of all messages about this task."""
        return self.request.task, self.request.attempt

    @property
    def process_id(self) -> int | None:
        return self.process.pid if self.process else None

    @property
    def running(self) -> bool:
        return self.process is not None and self.status is None

    def identity(self) -> Identity:
        return Identity(
            task=self.request.task,
            attempt=self.request.attempt,
            leader=self.process_id,
            output=self.output,
            waited_for=self.status is not None,
        )

    def outcome(self, now: float) -> Exited:
        status = self.status or 0
        signaled = os.WIFSIGNALED(status)
        return Exited(
            *self.key,
            code=None if signaled else os.WEXITSTATUS(status),
            signal=signal_name(os.WTERMSIG(status)) if signaled else None,
            oom=self.oom,
            tail=tuple(self.tail or ()),
            seconds=round(self.seconds, 3),
            ago_s=round(max(0.0, now - self.began - self.seconds), 3),
            death=self.death,
            stopped=self.stopped,
            exchanged=self.exchanged,
            cpu_s=round(self.cpu_s, 3),
            max_rss_bytes=self.max_rss_bytes,
        )
