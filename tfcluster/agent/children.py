"""Waits for children that have ended: tasks, warm interpreters, adopted orphans.

A warm interpreter forks tasks, and such a task may end before we learn its pid. So the
ends of unknown children are remembered for a while. Knows no tasks.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from tfcluster.agent import proc
from tfcluster.agent.constants import KIB
from tfcluster.agent.death_order import Deaths
from tfcluster.light_dataclasses import dataclass

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
            dead = self._deaths.take() if self._deaths.is_watched(pid) else []
            for each in dead or [pid]:
                self._deaths.forget(each)
                self._wait(each, claim)

    def _wait(self, pid: int, claim: Callable[[Ended], bool]) -> None:
        ended = _waited_for(pid)
        if ended is None:
            return
        self._unclaimed.pop(ended.pid, None)
        if not claim(ended):
            self._unclaimed[ended.pid] = ended
            if len(self._unclaimed) > _REMEMBERED:
                del self._unclaimed[next(iter(self._unclaimed))]

    def take(self, pid: int) -> Ended | None:
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
        max_rss_bytes=used.ru_maxrss * KIB,  # getrusage(2)
    )
