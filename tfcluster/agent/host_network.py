"""Finds this host's addresses, without any name service, and holds ports for its tasks.

Which address is used is decided elsewhere. Ports are bound, but never listened on.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Mapping

from tfcluster.agent.proc import PROC, text_or_empty

_VIRTUAL = ("docker", "virbr", "veth", "br-", "cni", "flannel", "lxc", "tun", "tap")


def way_in(environ: Mapping[str, str]) -> str | None:
    """Our address on the connection over which this process was started."""
    # ssh(1): client address, client port, server address, server port.
    words = environ.get("SSH_CONNECTION", "").split()
    if len(words) == 4 and not _is_local(words[2]):
        return words[2].partition("%")[0]
    # srun(1): the node that the step was started from.
    if origin := environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        return source_towards(origin)
    return None


def source_towards(address: str) -> str | None:
    """The source address of the route to ``address``; nothing is sent."""
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            source = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if _is_local(source) else source


def local_addresses() -> list[str]:
    """Every address of this host that others can use, physical interfaces first."""
    addresses = ipv4_addresses(text_or_empty(f"{PROC}/net/fib_trie"))
    names = interfaces(addresses, text_or_empty(f"{PROC}/net/route"))
    addresses.sort(key=lambda a: names.get(a, "").startswith(_VIRTUAL))
    return addresses + ipv6_addresses(text_or_empty(f"{PROC}/net/if_inet6"))


def ipv4_addresses(trie: str) -> list[str]:
    """Addresses in ``/proc/net/fib_trie``: leaves ``|-- A`` above ``host LOCAL``."""
    addresses: list[str] = []
    leaf = ""
    for line in trie.splitlines():
        words = line.split()
        if words[:1] == ["|--"]:
            leaf = words[1]
        elif "host LOCAL" in line and leaf not in addresses and not _is_local(leaf):
            addresses.append(leaf)
    return addresses


def ipv6_addresses(table: str) -> list[str]:
    """Global addresses in ``/proc/net/if_inet6``: hex digits, ..., scope, ..., name."""
    addresses = []
    for line in table.splitlines():
        words = line.split()
        if len(words) == 6 and words[3] == "00" and not words[5].startswith(_VIRTUAL):
            addresses.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0])))
    return addresses


def interfaces(addresses: list[str], routes: str) -> dict[str, str]:
    """Address -> interface, by the networks in ``/proc/net/route``."""
    names: dict[str, str] = {}
    for line in routes.splitlines()[1:]:
        words = line.split()
        if len(words) < 8 or words[7] == "00000000":
            continue
        network, mask = _number(words[1]), _number(words[7])
        for address in addresses:
            if _packed(address) & mask == network:
                names.setdefault(address, words[0])
    return names


def _number(text: str) -> int:
    """An IPv4 address as the kernel prints it: hex digits, lowest byte first."""
    return int.from_bytes(bytes.fromhex(text), "little")


def _packed(address: str) -> int:
    return int.from_bytes(socket.inet_pton(socket.AF_INET, address), "big")


def _is_local(address: str) -> bool:
    """Whether others cannot use it: loopback, link-local, unspecified, or invalid."""
    # Not the module ipaddress: importing it would delay the agent's start noticeably.
    try:
        if ":" not in address:
            number = _packed(address)
            return number >> 24 == 127 or number >> 16 == 0xA9FE or number == 0
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    except (OSError, ValueError):
        return True
    number = int.from_bytes(packed, "big")
    return number in (0, 1) or number >> 118 == 0xFE80 >> 6


_LOWEST = 20000
_HIGHEST = 65535
_SYSCTL = "/proc/sys/net/ipv4"


def parse_reserved(text: str) -> set[int]:
    """Parse ip_local_reserved_ports: ``8080,9148-9150``."""
    ports: set[int] = set()
    for part in text.split(","):
        low, _, high = part.strip().partition("-")
        if low:
            ports.update(range(int(low), int(high or low) + 1))
    return ports


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
    """The ports that this agent holds until it exits.

    A port is bound without SO_REUSEPORT, so that it is ours alone. The option is set
    afterwards: then only binds of the same user with it succeed, see socket(7).
    """

    def __init__(self) -> None:
        self._held: dict[int, list[socket.socket]] = {}
        self._families = [socket.AF_INET]
        if _has_ipv6():
            self._families.append(socket.AF_INET6)

    def hold(
        self, count: int, low: int | None, high: int | None
    ) -> tuple[list[int], str | None]:
        """Hold ``count`` ports. Returns those held, and a cause if there are fewer."""
        limited = low is not None and high is not None
        wanted = range(low or 0, (high or 0) + 1) if limited else _default_ports()
        held: list[int] = []
        cause: str | None = None
        for port in shuffled(list(wanted)):
            if len(held) == count:
                break
            try:
                if port not in self._held and self._bind(port):
                    held.append(port)
            except OSError as error:
                cause = error.strerror
                break
        if len(held) < count and cause is None:
            where = f"between {low} and {high}" if limited else "on this host"
            cause = f"only {len(held)} of {count} ports {where} are free"
        return held, cause

    def _bind(self, port: int) -> bool:
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
    ephemeral = text_or_empty(f"{_SYSCTL}/ip_local_port_range") or "32768 60999"
    low, high = map(int, ephemeral.split())
    reserved = text_or_empty(f"{_SYSCTL}/ip_local_reserved_ports")
    return candidates((low, high), parse_reserved(reserved))
