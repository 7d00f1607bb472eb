"""Rejects the connections of strangers to a listening socket of another process."""

from __future__ import annotations

import os
import socket
import struct
from array import array

from tfcluster.agent.loop import Loop
from tfcluster.base import peer_filter
from tfcluster.base.light_dataclasses import dataclass

_ACCEPT_RETRY_S = 0.5
_SO_ATTACH_REUSEPORT_CBPF = 51  # asm-generic/socket.h; Python has no name for it


@dataclass(frozen=True, slots=True)
class ListenerGroup:
    """What the sockets among which the kernel chooses have in common."""

    family: int
    host: str
    port: int
    only_ipv6: bool

    @classmethod
    def of(cls, listener: socket.socket) -> ListenerGroup:
        host, port = listener.getsockname()[:2]
        only_ipv6 = listener.family == socket.AF_INET6 and bool(
            listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
        )
        return cls(listener.family, host, port, only_ipv6)

    @property
    def is_private(self) -> bool:
        """Whether only programs of this host can connect anyway."""
        return self.host == "::1" or self.host.startswith("127.")


class RejectingListener:
    """Joins a group of ``count`` sockets, and lets only ``networks`` through to them.

    Sockets of one user that listen on one port with SO_REUSEPORT form a group, from
    which the kernel chooses one socket for each connection. A program in the kernel
    sends the connections of strangers to our socket, and leaves the others to the
    sockets that were there before. It needs neither privileges nor the cooperation of
    the listening program.

    Raises OSError if it cannot join, for example a group without SO_REUSEPORT.
    """

    def __init__(
        self,
        loop: Loop,
        group: ListenerGroup,
        count: int,
        networks: tuple[peer_filter.Network, ...],
    ) -> None:
        self._loop = loop
        self._socket = socket.socket(group.family, socket.SOCK_STREAM)
        try:
            self._join(group)
            # struct sock_fprog: the number of instructions, and their address.
            code = array("B", peer_filter.program(networks, count))
            size, (address, _) = (
                len(code) // peer_filter.INSTRUCTION.size,
                code.buffer_info(),
            )
            argument = struct.pack("@HP", size, address)
            self._socket.setsockopt(
                socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, argument
            )
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)
        self.inode = os.fstat(self._socket.fileno()).st_ino
        self._watch()

    def _join(self, group: ListenerGroup) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if group.family == socket.AF_INET6:
            self._socket.setsockopt(
                socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(group.only_ipv6)
            )
        self._socket.bind((group.host, group.port))
        self._socket.listen()

    def close(self) -> None:
        self._loop.unwatch(self._socket.fileno())
        self._socket.close()

    def _watch(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.watch(self._socket.fileno(), self._reject)

    def _reject(self) -> None:
        try:
            while True:
                self._socket.accept()[0].close()
        except BlockingIOError:
            return
        except OSError:  # such as no free descriptor: a retry must not follow at once
            self._loop.unwatch(self._socket.fileno())
            self._loop.later(_ACCEPT_RETRY_S, self._watch)
