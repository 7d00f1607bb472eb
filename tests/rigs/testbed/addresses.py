"""Names and addresses of a rig's hosts. Pure; they are the same in every rig.

Rigs are isolated, so all of them can use a range reserved for tests of networks
(RFC 2544), and the IPv6 range reserved for documentation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DOMAIN = "cluster.test"
MOST_NODES = 1000
"""A bridge of Linux has 1,024 ports."""
NETWORK_BITS = 16

_LOOPBACK = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"


@dataclass(frozen=True, slots=True)
class Station:
    """The name and addresses of one port of the rig's bridge."""

    name: str
    number: int

    @property
    def ipv4(self) -> str:
        return f"198.18.{self.number >> 8}.{self.number & 255}"

    @property
    def ipv6(self) -> str:
        return f"2001:db8:7f::{self.number:x}"

    @property
    def full_name(self) -> str:
        return f"{self.name}.{DOMAIN}"


def stations(nodes: int, *, with_head: bool) -> tuple[Station, ...]:
    """The login host, then the schedulers' head if wanted, then node1, node2, ...

    Raises ValueError for more nodes than there are addresses.
    """
    if not 0 < nodes <= MOST_NODES:
        raise ValueError(f"1 to {MOST_NODES} nodes, not {nodes}")
    head = (Station("head", 3),) if with_head else ()
    numbered = (Station(f"node{i}", 10 + i) for i in range(1, nodes + 1))
    return (Station("login", 2), *head, *numbered)


def hosts_file(every: Iterable[Station]) -> str:
    """The text of /etc/hosts, which is the same on each host.

    IPv6 addresses have separate names (``node1-v6``): a scheduler that supports only
    IPv4 must not find an address that it cannot use.
    """
    lines = (
        f"{each.ipv4} {each.full_name} {each.name}\n{each.ipv6} {each.name}-v6\n"
        for each in every
    )
    return _LOOPBACK + "".join(lines)
