"""In which order children have died, as the kernel saw it. Reaps nobody.

waitid() finds those that died while the agent did not run in the order in which they
were started, which says nothing of who failed because of whom. The ready list of an
epoll instance is a queue, so pidfds come out of it as their processes died.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress

_AT_ONCE = 4096


class Deaths:
    """Of the children that are watched."""

    def __init__(self) -> None:
        self._pidfds: dict[int, int] = {}  # by pid
        self._pids: dict[int, int] = {}  # by pidfd
        self._epoll = select.epoll()

    def watch(self, pid: int) -> None:
        """From now on the time of its death is known beside that of others."""
        # Before Linux 5.3, or without descriptors: waitid's order has to do.
        with suppress(AttributeError, OSError):
            pidfd = os.pidfd_open(pid)
            self._pidfds[pid], self._pids[pidfd] = pidfd, pid
            self._epoll.register(pidfd, select.EPOLLIN)

    def is_watched(self, pid: int) -> bool:
        return pid in self._pidfds

    def take(self) -> list[int]:
        """Those that have died since the last call, in that order; watched no more."""
        dead = [
            self._pids[pidfd] for pidfd, _ in self._epoll.poll(0, maxevents=_AT_ONCE)
        ]
        for pid in dead:
            self.forget(pid)
        return dead

    def forget(self, pid: int) -> None:
        """It was waited for."""
        pidfd = self._pidfds.pop(pid, None)
        if pidfd is not None:
            del self._pids[pidfd]
            os.close(pidfd)  # which ends its registration, too
