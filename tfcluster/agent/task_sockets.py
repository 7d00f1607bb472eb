"""Duplicates the sockets of tasks, so that the agent can set options on them.

Uses pidfd_getfd(2), which exists since Linux 5.6 and requires the right to trace the
process. The agent has it, because tasks are its descendants and run as the same user.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable, Iterator

from tfcluster.agent.proc import PROC
from tfcluster.light_dataclasses import dataclass

_PIDFD_OPEN, _PIDFD_GETFD = 434, 438
"""System call numbers, the same on every architecture of Linux."""
_SOCKET = "socket:["


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A socket that a process has open."""

    pid: int
    number: int
    inode: int


def descriptors_of(pids: Iterable[int]) -> list[Descriptor]:
    """The sockets that these processes have open."""
    found: list[Descriptor] = []
    for pid in pids:
        folder = f"{PROC}/{pid}/fd"
        try:
            names = os.listdir(folder)
        except OSError:
            continue  # the process has ended
        for name in names:
            try:
                target = os.readlink(f"{folder}/{name}")
            except OSError:
                continue  # closed in the meantime
            if target.startswith(_SOCKET):
                inode = int(target.removeprefix(_SOCKET).rstrip("]"))
                found.append(Descriptor(pid, int(name), inode))
    return found


def duplicates(descriptors: Iterable[Descriptor]) -> Iterator[socket.socket]:
    """Yield a duplicate of each socket, then close it; skips sockets closed since.

    Raises OSError if the kernel does not allow it.
    """
    try:
        import ctypes  # only for programs that may listen: it takes long to import
    except ImportError as error:  # Python can be built without it
        raise OSError("the agent's Python has no ctypes") from error

    call = ctypes.CDLL(None, use_errno=True).syscall
    for each in descriptors:
        # Not os.pidfd_open: a Python that was built for old kernels has none.
        process = call(_PIDFD_OPEN, each.pid, 0)
        if process >= 0:
            copy = call(_PIDFD_GETFD, process, each.number, 0)
            code = ctypes.get_errno()
            os.close(process)
        else:
            copy, code = -1, ctypes.get_errno()
        if copy >= 0:
            with socket.socket(fileno=copy) as found:
                yield found
        elif code not in (errno.EBADF, errno.ESRCH):
            raise OSError(code, os.strerror(code))
