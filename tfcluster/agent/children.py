"""Waits for children that have ended, in order, and finds out why they have.

Children are tasks, warm interpreters and adopted orphans. A warm interpreter forks
tasks, and such a task may end before we learn its pid. So the ends of unknown children
are remembered for a while. Knows no tasks.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from contextlib import suppress

from tfcluster.agent import proc
from tfcluster.agent.proc import text_or_empty
from tfcluster.base.light_dataclasses import dataclass

_AT_ONCE = 4096


class Deaths:
    """The order in which watched children died. Does not reap them.

    Children that died while the agent was not running are returned by waitid() in the
    order in which they were started, which says nothing about who failed because of
    whom. The ready list of an epoll instance is a queue, so it returns pidfds in the
    order in which their processes died.
    """

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}  # by pid
        self._pids: dict[int, int] = {}  # by pidfd
        self._epoll = select.epoll()

    def watch(self, pid: int) -> None:
        """Include a child in the order from now on."""
        # Before Linux 5.3, or without free descriptors, waitid's order must suffice.
        with suppress(AttributeError, OSError):
            pidfd = os.pidfd_open(pid)
            self._pidfds[pid], self._pids[pidfd] = pidfd, pid
            self._epoll.register(pidfd, select.EPOLLIN)

    def is_watched(self, pid: int) -> bool:
        return pid in self._pidfds

    def pop_dead(self) -> list[int]:
        """Children that died since the last call, in order; no longer watched."""
        dead = [
            self._pids[pidfd] for pidfd, _ in self._epoll.poll(0, maxevents=_AT_ONCE)
        ]
        for pid in dead:
            self.forget(pid)
        return dead

    def forget(self, pid: int) -> None:
        """Stop watching a child that was reaped."""
        pidfd = self._pidfds.pop(pid, None)
        if pidfd is not None:
            del self._pids[pidfd]
            os.close(pidfd)  # also ends its registration


def oom_kills(text: str) -> int | None:
    """N of the line ``oom_kill N``, as in memory.events and /proc/vmstat, or None."""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill":
            return int(value)
    return None


class OomCounter:
    """Counts processes killed by the OOM killer in this process's control group.

    Without version 2 of control groups, those of the whole host are counted. It is
    asked when something other than the agent killed a process.
    """

    def __init__(self) -> None:
        groups = text_or_empty("/proc/self/cgroup").splitlines()
        path = next((g[3:].strip("/") for g in groups if g.startswith("0::")), "")
        own = os.path.join("/sys/fs/cgroup", path, "memory.events")
        counted = oom_kills(text_or_empty(own)) is not None
        self._file = own if counted else "/proc/vmstat"
        self._seen = self._now()

    def _now(self) -> int:
        return oom_kills(text_or_empty(self._file)) or 0

    def struck(self) -> bool:
        """Whether it has struck again; each strike is returned once."""
        if self._now() <= self._seen:
            return False
        self._seen += 1
        return True


_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Ended:
    """A child that was reaped; ``status`` is as in waitpid(2).

    CPU time and the largest resident memory include children that it has waited for.
    """

    pid: int
    status: int
    start_time: int
    cpu_s: float = 0.0
    max_rss_bytes: int = 0


class Children:
    """Reaps children, and keeps the ends of those that nobody claims."""

    def __init__(self, deaths: Deaths) -> None:
        self._deaths = deaths
        self._unclaimed: dict[int, Ended] = {}

    def reap(self, claim: Callable[[Ended], bool]) -> None:
        """Reap all ended children without blocking, watched ones in order of death.

        ``claim`` returns whether it knows the child.
        """
        while pid := _ended_child():
            # A watched child that can be reaped is among the deaths.
            dead = self._deaths.pop_dead() if self._deaths.is_watched(pid) else []
            for child in dead or [pid]:
                self._deaths.forget(child)
                self._wait(child, claim)

    def _wait(self, pid: int, claim: Callable[[Ended], bool]) -> None:
        ended = _waited_for(pid)
        if ended is None:
            return
        self._unclaimed.pop(ended.pid, None)
        if not claim(ended):
            self._unclaimed[ended.pid] = ended
            if len(self._unclaimed) > _REMEMBERED:
                del self._unclaimed[next(iter(self._unclaimed))]

    def unclaimed(self, pid: int) -> Ended | None:
        """The end of a child that nobody has claimed; None if it has not ended."""
        now = proc.read(pid)
        ended = self._unclaimed.pop(pid, None)
        if now is not None and now.ppid == os.getpid():
            return None  # the pid was reused: this child has not been reaped yet
        return ended


def _ended_child() -> int | None:
    """The pid of a child that can be reaped; does not reap it."""
    try:
        info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if info is None else info.si_pid


def _waited_for(pid: int) -> Ended | None:
    # Read /proc first: a zombie's entry disappears when it is reaped.
    process = proc.read(pid)
    try:
        _, status, used = os.wait4(pid, 0)
    except ChildProcessError:
        return None
    return Ended(
        pid=pid,
        status=status,
        start_time=process.start_time if process else 0,
        cpu_s=used.ru_utime + used.ru_stime,
        max_rss_bytes=used.ru_maxrss * 1024,  # getrusage(2)
    )
