"""Waits for children that have ended: tasks, warm interpreters, adopted orphans.

The end of a task that was forked for us may be seen before we are told its pid; so the
ends of unknown children are remembered for a while. Knows no tasks.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from tfcluster.agent import proc
from tfcluster.agent.death_order import Deaths
from tfcluster.agent.light_dataclasses import dataclass

_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Ended:
    """A child that was waited for."""

    pid: int
    status: int
    start_time: int


class Children:
    """``claim`` says whether it knows the child."""

    def __init__(self, deaths: Deaths) -> None:
        self._deaths = deaths
        self._unclaimed: dict[int, Ended] = {}

    def reap(self, claim: Callable[[int, int], bool]) -> None:
        """Wait for all that have ended, without blocking: those that are watched in
        the order of their deaths."""
        while pid := _ended_child():
            # A child that can be waited for is among the deaths, if it is watched.
            dead = self._deaths.take() if self._deaths.is_watched(pid) else []
            for each in dead or [pid]:
                self._deaths.forget(each)
                self._wait(each, claim)

    def _wait(self, pid: int, claim: Callable[[int, int], bool]) -> None:
        ended = _waited_for(pid)
        if ended is None:
            return
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


def _ended_child() -> int | None:
    """One that can be waited for; it is only looked at."""
    try:
        info = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if info is None else info.si_pid


def _waited_for(pid: int) -> Ended | None:
    # Look first: what a zombie was can be read only until it is waited for.
    process = proc.read(pid)
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:
        return None
    return Ended(pid, status, process.start_time if process else 0)
