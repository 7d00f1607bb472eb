"""The state of one task: the request and what became of it. Has no effects."""

from __future__ import annotations

import os
import signal

from tfcluster.agent.claims import Claims
from tfcluster.agent.events import EventSocket
from tfcluster.agent.loop import Timer
from tfcluster.agent.proc import ProcessEntry
from tfcluster.agent.process_membership import Identity
from tfcluster.light_dataclasses import dataclass, field
from tfcluster.protocol.frames import ProtocolError
from tfcluster.protocol.messages import Exited
from tfcluster.protocol.requests import Start


@dataclass(eq=False)
class AgentTask:
    """One attempt of a task, from the request to the end of its last process."""

    request: Start
    stream: int  # the capture's number for its output
    output: str  # the same pipe, as /proc shows it: pipe:[INODE]
    events: EventSocket
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
    leftovers: dict[int, ProcessEntry] = field(default_factory=dict)
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
        """The message once the task has ended."""
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


def signal_number(name: str) -> int:
    """The opposite of ``signal_name``, for names. Raises ProtocolError."""
    try:
        return signal.Signals[f"SIG{name}"].value
    except KeyError:
        raise ProtocolError(f"no signal is called {name!r}") from None


def signal_name(signum: int) -> str:
    """A signal's name: ``KILL``; ``RTMIN+3`` for a real-time signal without a name."""
    try:
        return signal.Signals(signum).name.removeprefix("SIG")
    except ValueError:
        return f"RTMIN+{signum - signal.SIGRTMIN}"
