"""The order in which children died, according to the kernel. Does not reap them.

Children that died while the agent was not running are returned by waitid() in the order
in which they were started, which says nothing about who failed because of whom. The
ready list of an epoll instance is a queue, so it returns pidfds in the order in which
their processes died.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress

_AT_ONCE = 4096


class Deaths:
    """The order of the deaths of watched children."""

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

    def take(self) -> list[int]:
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
