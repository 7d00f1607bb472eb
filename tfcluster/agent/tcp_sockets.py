"""Lists the TCP sockets that listen on this host, and those that tasks have open.

Netlink (sock_diag(7)) lets the kernel look at listening sockets only. /proc/net/tcp has
the same data, but to produce it the kernel walks through the table of all connections,
which took 30 times as long where it was measured. It is read where there is no netlink.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress

from tfcluster.agent import proc
from tfcluster.base.light_dataclasses import dataclass

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE = 2, 3
_LISTEN = 10  # TCP_LISTEN, the number of a state
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_QUESTION = struct.Struct("=BBBxI48x")  # struct inet_diag_req_v2
# struct inet_diag_msg: the family, the local port, and after the rest of the addresses
# and the queues, the uid and the inode.
_ANSWER = struct.Struct("=B3x2s46x12xII")
_READ_BYTES = 1 << 16
_ANSWER_S = 1.0


@dataclass(frozen=True, slots=True)
class Listener:
    port: int
    uid: int
    inode: int


def listeners() -> list[Listener]:
    try:
        with socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG
        ) as link:
            return [
                listener
                for family in (socket.AF_INET, socket.AF_INET6)
                for listener in _asked(link, family)
            ]
    except OSError:
        return from_proc()


def from_proc() -> list[Listener]:
    rows: list[Listener] = []
    for name in ("tcp", "tcp6"):
        with suppress(OSError), open(f"{proc.PROC}/net/{name}") as lines:
            rows += parse(lines)
    return rows


def parse(lines: Iterable[str]) -> Iterator[Listener]:
    for line in lines:
        fields = line.split()
        if len(fields) > 9 and fields[3] == f"{_LISTEN:02X}":
            port = int(fields[1].rpartition(":")[2], 16)
            yield Listener(port, uid=int(fields[7]), inode=int(fields[9]))


def _asked(link: socket.socket, family: int) -> Iterator[Listener]:
    """The sockets of one family. Raises OSError if the kernel does not answer."""
    question = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 1 << _LISTEN)
    size = _HEADER.size + len(question)
    head = _HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _REQUEST | _DUMP, family, 0)
    link.settimeout(_ANSWER_S)
    link.send(head + question)
    while True:
        data, at = link.recv(_READ_BYTES), 0
        while at + _HEADER.size <= len(data):
            size, kind, _, sequence, _ = _HEADER.unpack_from(data, at)
            if kind == _DONE and sequence == family:
                return
            if kind == _ERROR or size < _HEADER.size:
                raise OSError("the kernel does not list listening sockets")
            if kind == _SOCK_DIAG_BY_FAMILY and sequence == family:
                answer = _ANSWER.unpack_from(data, at + _HEADER.size)
                _, port, uid, inode = answer
                yield Listener(int.from_bytes(port, "big"), uid, inode)
            at += (size + 3) // 4 * 4


_PIDFD_OPEN, _PIDFD_GETFD = 434, 438
"""System call numbers, the same on every architecture of Linux."""
_SOCKET = "socket:["


@dataclass(frozen=True, slots=True)
class Descriptor:
    pid: int
    number: int
    inode: int


def descriptors_of(pids: Iterable[int]) -> list[Descriptor]:
    return [
        Descriptor(pid, number, int(target.removeprefix(_SOCKET).rstrip("]")))
        for pid in pids
        for number, target in proc.descriptors(pid).items()
        if target.startswith(_SOCKET)
    ]


def duplicates(descriptors: Iterable[Descriptor]) -> Iterator[socket.socket]:
    """Yield a duplicate of each socket, to set options on it, and then close it.

    Closed sockets are skipped. Uses pidfd_getfd(2), which exists since Linux 5.6 and
    requires the right to trace the process. Raises OSError if that is not allowed.
    """
    try:
        import ctypes  # only for programs that may listen: it takes long to import
    except ImportError as error:  # Python can be built without it
        raise OSError("the agent's Python has no ctypes") from error

    call = ctypes.CDLL(None, use_errno=True).syscall
    for descriptor in descriptors:
        # Not os.pidfd_open: a Python that was built for old kernels has none.
        process = call(_PIDFD_OPEN, descriptor.pid, 0)
        if process >= 0:
            copy = call(_PIDFD_GETFD, process, descriptor.number, 0)
            code = ctypes.get_errno()
            os.close(process)
        else:
            copy, code = -1, ctypes.get_errno()
        if copy >= 0:
            with socket.socket(fileno=copy) as duplicate:
                yield duplicate
        elif code not in (errno.EBADF, errno.ESRCH):
            raise OSError(code, os.strerror(code))
