"""Holds ports for our own tasks: binds them, but never listens on them.

A port is bound without SO_REUSEPORT, so that it is ours alone; the option is set
afterwards. From then on, binds of the same user with SO_REUSEPORT succeed and all
others fail, see socket(7). Knows no tasks.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

from tfcluster.agent.proc import text_of

_LOWEST = 20000
_HIGHEST = 65535
_SYSCTL = "/proc/sys/net/ipv4"


def parse_reserved(text: str) -> set[int]:
    """Parse ip_local_reserved_ports: ``8080,9148-9150``."""
    found: set[int] = set()
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        if low:
            found.update(range(int(low), int(high or low) + 1))
    return found


def candidates(ephemeral: tuple[int, int], reserved: set[int]) -> list[int]:
    """The ports that outgoing connections do not take (outside of the ephemeral range),
    or all ports if there are none such; in either case without the reserved ports."""
    low, high = ephemeral
    below = range(_LOWEST, min(low, _HIGHEST + 1))
    above = range(max(_LOWEST, high + 1), _HIGHEST + 1)
    free = [*below, *above] or [*range(_LOWEST, _HIGHEST + 1)]
    return [port for port in free if port not in reserved] if reserved else free


def shuffled(ports: list[int]) -> Iterator[int]:
    """The ports in random order, so that agents that start together do not collide."""
    rest = list(ports)
    while rest:
        index = int.from_bytes(os.urandom(4), "big") % len(rest)
        rest[index], rest[-1] = rest[-1], rest[index]
        yield rest.pop()


class Ports:
    """The ports that this agent holds until it exits."""

    def __init__(self) -> None:
        self._held: dict[int, list[socket.socket]] = {}
        self._families = [socket.AF_INET]
        if _has_ipv6():
            self._families.append(socket.AF_INET6)

    def hold(
        self, count: int, low: int | None, high: int | None
    ) -> tuple[list[int], str | None]:
        """Hold ``count`` ports. Returns those held, and a cause if there are fewer."""
        given = low is not None and high is not None
        wanted = range(low or 0, (high or 0) + 1) if given else _default_ports()
        found: list[int] = []
        cause: str | None = None
        for port in shuffled(list(wanted)):
            if len(found) == count:
                break
            try:
                if port not in self._held and self._bind(port):
                    found.append(port)
            except OSError as error:
                cause = error.strerror
                break
        if len(found) < count and cause is None:
            where = f"between {low} and {high}" if given else "on this host"
            cause = f"only {len(found)} of {count} ports {where} are free"
        return found, cause

    def _bind(self, port: int) -> bool:
        """Whether the port could be bound. Raises OSError for other problems."""
        sockets: list[socket.socket] = []
        try:
            for family in self._families:
                sockets.append(_bound(family, port))
        except OSError as error:
            for held in sockets:
                held.close()
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
        # Set only now that all sockets are bound: so far nobody could share the port,
        # not even another run of the same user.
        for held in sockets:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._held[port] = sockets
        return True


def _bound(family: socket.AddressFamily, port: int) -> socket.socket:
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        held.bind(("", port))
    except OSError:
        held.close()
        raise
    return held


def _has_ipv6() -> bool:
    try:
        _bound(socket.AF_INET6, 0).close()
    except OSError:
        return False
    return True


def _default_ports() -> list[int]:
    try:
        low, high = text_of(f"{_SYSCTL}/ip_local_port_range").split()
        reserved = text_of(f"{_SYSCTL}/ip_local_reserved_ports")
    except OSError:
        low, high, reserved = "32768", "60999", ""
    return candidates((int(low), int(high)), parse_reserved(reserved))
