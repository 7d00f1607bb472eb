"""Opens descriptors of other processes, even from within a user namespace.

The kernel does not let a process in such a namespace open what is in /proc/PID/fd of
processes outside of it. So it leaves a small process behind that opens this for it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
from typing import NoReturn

_PARENT_DIES = 1
"""An option of prctl(2): get a signal when the parent ends."""
_REQUEST = struct.Struct("qqq")
_MOST_BYTES = 256

KEPT = "TFCLUSTER_FILE_OPENER"
"""The variable with the descriptor for the process that an earlier program has left."""

_helper: socket.socket | None = None


def open_of(pid: int, descriptor: int, flags: int, kind: str) -> int:
    """Open a descriptor of another process. Raises OSError.

    ``kind`` is the beginning of what /proc must say it is: ``/memfd:``. Opening
    something else, a FIFO for instance, could block.
    """
    if _helper is None:
        path = f"/proc/{pid}/fd/{descriptor}"
        if not os.readlink(path).startswith(kind):  # noqa: PTH115 - it may be no path
            raise OSError(f"not a {kind.strip('/:')}")
        return os.open(path, flags | os.O_CLOEXEC)
    _helper.sendall(_REQUEST.pack(pid, descriptor, flags) + kind.encode())
    answer, descriptors, _, _ = socket.recv_fds(_helper, _MOST_BYTES, 1)
    if not descriptors:
        raise OSError(answer.decode())
    return descriptors[0]


def descriptor() -> int | None:
    """The descriptor that the next program in this process needs, if any."""
    return None if _helper is None else _helper.fileno()


def start() -> None:
    """Leave the process behind, unless it is there. It ends with this one.

    Raises OSError.
    """
    global _helper
    if (kept := os.environ.pop(KEPT, None)) is not None:
        _helper = socket.socket(fileno=int(kept))
        _helper.set_inheritable(False)
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        try:
            _serve(theirs.detach(), parent)
        finally:
            os._exit(1)
    theirs.close()
    _helper = ours


def _serve(descriptor: int, parent: int) -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the parent
    ctypes.CDLL(None).prctl(_PARENT_DIES, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    os.closerange(0, descriptor)
    os.closerange(descriptor + 1, os.sysconf("SC_OPEN_MAX"))
    with socket.socket(fileno=descriptor) as end:
        while request := end.recv(_MOST_BYTES):
            pid, number, flags = _REQUEST.unpack_from(request)
            kind = request[_REQUEST.size :].decode()
            try:
                opened = open_of(pid, number, flags, kind)
            except OSError as error:
                end.sendall(str(error).encode()[:_MOST_BYTES])
            else:
                socket.send_fds(end, [b"opened"], [opened])
                os.close(opened)
    os._exit(0)
