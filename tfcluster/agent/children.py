"""Waits for children that have ended: tasks, warm interpreters, adopted orphans.

The end of a task that was forked for us may be seen before we are told its pid; so the
ends of unknown children are remembered for a while. Knows no tasks.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from tfcluster.agent import proc
from tfcluster.agent.values import dataclass

_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Ended:
    """A child that was waited for."""

    pid: int
    status: int
    start_time: int


class Children:
    """``claim`` says whether it knows the child."""

    def __init__(self) -> None:
        self._unclaimed: dict[int, Ended] = {}

    def reap(self, claim: Callable[[int, int], bool]) -> None:
        """Wait for all that have ended, without blocking."""
        while (ended := _next()) is not None:
            self._unclaimed.pop(ended.pid, None)
            if not claim(ended.pid, ended.status):
                self._unclaimed[ended.pid] = ended
                if len(self._unclaimed) > _REMEMBERED:
                    del self._unclaimed[next(iter(self._unclaimed))]

    def take(self, pid: int) -> Ended | None:
        """The end of a child that nobody had claimed; None if it has not ended."""
        now = proc.read(pid)
        ended = self._unclaimed.pop(pid, None)
        if now is not None and now.ppid == os.getpid():
            return None  # the pid was reused: this one is yet to be waited for
        return ended


def _next() -> Ended | None:
    try:
        # Look first: what a zombie was can be read only until it is waited for.
        info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return None
        process = proc.read(info.si_pid)
        pid, status = os.waitpid(info.si_pid, 0)
    except ChildProcessError:
        return None
    return Ended(pid, status, process.start_time if process else 0)
