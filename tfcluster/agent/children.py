"""Waits for children that have ended, in order, and finds out why they have.

Children are tasks, other programs of the agent, and adopted orphans. Knows no tasks.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Collection
from contextlib import suppress
from resource import struct_rusage

from tfcluster.agent import proc
from tfcluster.agent.proc import text_or_empty

_AT_ONCE = 4096
_REMEMBERED = 4096
_CGROUPS = "/sys/fs/cgroup"


OnEnd = Callable[[int, struct_rusage], None]
"""Called with the status of a child, as in waitpid(2), and with what it and children
that it has waited for have used, as in getrusage(2)."""


class Children:
    """Reaps children, and calls back for each that is expected, in order of death.

    Children that died while the agent was not running are returned by waitid() in the
    order in which they were started, which says nothing about who failed because of
    whom. The ready list of an epoll instance is a queue, so it returns pidfds in the
    order in which their processes died.

    A warm interpreter forks tasks, and such a task may end before we learn its pid. So
    the ends of unexpected children are remembered for a while.
    """

    def __init__(self) -> None:
        self._on_end: dict[int, OnEnd] = {}
        self._unexpected: dict[int, tuple[int, struct_rusage]] = {}
        self._pidfds: dict[int, int] = {}  # by pid
        self._pids: dict[int, int] = {}  # by pidfd
        self._epoll = select.epoll()

    @property
    def expected(self) -> Collection[int]:
        return self._on_end.keys()

    def expect(self, pid: int, on_end: OnEnd) -> None:
        """Call ``on_end`` when this child has ended, which may be now."""
        process = proc.read(pid)
        ended = self._unexpected.pop(pid, None)
        # If the pid was reused, this child has not been reaped yet.
        if ended is not None and (process is None or process.ppid != os.getpid()):
            on_end(*ended)
            return
        self._on_end[pid] = on_end
        # Before Linux 5.3, or without free descriptors, waitid's order must suffice.
        with suppress(AttributeError, OSError):
            pidfd = os.pidfd_open(pid)
            self._pidfds[pid], self._pids[pidfd] = pidfd, pid
            self._epoll.register(pidfd, select.EPOLLIN)

    def reap(self) -> None:
        """Reap all ended children without blocking."""
        while pid := _ended_child():
            # A child with a pidfd that can be reaped is among the dead.
            dead = self._dead() if pid in self._pidfds else [pid]
            for child in dead or [pid]:
                self._reap(child)

    def _dead(self) -> list[int]:
        ready = self._epoll.poll(0, maxevents=_AT_ONCE)
        return [self._pids[pidfd] for pidfd, _ in ready]

    def _reap(self, pid: int) -> None:
        if pidfd := self._pidfds.pop(pid, None):
            del self._pids[pidfd]
            os.close(pidfd)  # also ends its registration
        on_end = self._on_end.pop(pid, None)
        try:
            _, status, used = os.wait4(pid, 0)
        except ChildProcessError:
            return
        if on_end is not None:
            on_end(status, used)
            return
        self._unexpected[pid] = status, used
        if len(self._unexpected) > _REMEMBERED:
            del self._unexpected[next(iter(self._unexpected))]


def _ended_child() -> int | None:
    """The pid of a child that can be reaped; does not reap it."""
    try:
        info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if info is None else info.si_pid


def oom_kills(text: str) -> int | None:
    """N of the line ``oom_kill N``, as in memory.events and /proc/vmstat, or None."""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == "oom_kill":
            return int(value)
    return None


class OomCounter:
    """Counts processes killed by the OOM killer in this process's control group."""

    def __init__(self) -> None:
        files = ["/proc/vmstat"]  # of the whole host, if the group has no counter
        for line in text_or_empty("/proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                files.insert(0, f"{_CGROUPS}{path}/memory.events")
            elif "memory" in controllers.split(","):
                # In a container, the path is the one on the host, but the mount shows
                # only the container's own groups.
                files.insert(0, f"{_CGROUPS}/memory/memory.oom_control")
                files.insert(0, f"{_CGROUPS}/memory{path}/memory.oom_control")
        counts = ((file, oom_kills(text_or_empty(file))) for file in files)
        self._file = next((f for f, count in counts if count is not None), files[-1])
        self._seen = self._now()

    def _now(self) -> int:
        return oom_kills(text_or_empty(self._file)) or 0

    def struck(self) -> bool:
        """Whether it has struck again; each strike is returned once."""
        if self._now() <= self._seen:
            return False
        self._seen += 1
        return True
