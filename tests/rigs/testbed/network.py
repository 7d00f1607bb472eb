"""The rig's bridge and the cable to each host. Knows only namespaces.

The bridge has no route to the machine or to another rig.
"""

from __future__ import annotations

from tests.rigs.testbed.addresses import NETWORK_BITS, Station
from tests.rigs.testbed.commands import check, run
from tests.rigs.testbed.namespaces import Namespaces, Where

_BRIDGE = "bridge"
_NIC = "eth0"
_NOBODY = "02:00:00:00:00:01"
"""An Ethernet address that no host has."""


def make_bridge(ground: Namespaces) -> None:
    _ip(
        ground,
        f"link add {_BRIDGE} type bridge mcast_snooping 0",
        f"link set {_BRIDGE} up",
        "link set lo up",
    )


class Cable:
    """The connection from a host to the bridge; its end there has the host's name."""

    def __init__(self, ground: Namespaces, station: Station, host: Where) -> None:
        self._ground = ground
        self._station = station
        self._host = host

    def plug(self) -> None:
        """Give a host that has just started a network card and its addresses."""
        name, host = self._station.name, self._host()
        _ip(
            self._ground,
            f"link add {name} type veth peer name {_NIC} netns {host.pid}",
            f"link set {name} master {_BRIDGE} up",
        )
        _ip(
            host,
            "link set lo up",
            # A fixed address: after a restart with a new one, other hosts would send to
            # the old one for some seconds.
            f"link set {_NIC} address {_mac_of(self._station.ipv4)}",
            f"addr add {self._station.ipv4}/{NETWORK_BITS} dev {_NIC}",
            f"addr add {self._station.ipv6}/64 dev {_NIC} nodad",
            f"link set {_NIC} up",
        )

    def unplug(self) -> None:
        """Remove the network card now; the end of its host would do so later."""
        words = f"ip link del {self._station.name}".split()
        run(self._ground.enter_network(*words))

    def cut(self) -> None:
        """Drop all packets silently: no FIN, no RST, no ICMP."""
        _ip(self._ground, f"link set {self._station.name} down")

    def heal(self) -> None:
        _ip(self._ground, f"link set {self._station.name} up")

    def limit(self, kbit_per_s: int, burst_kib: int = 16) -> None:
        """Limit the bandwidth in each direction.

        ``burst_kib``: how many KiB may pass at once after a pause. Rates of Gbit/s need
        hundreds, because the kernel looks only every few milliseconds.
        """
        shape = f"tbf rate {kbit_per_s}kbit burst {burst_kib}kb latency 200ms"
        for where, device in self._ends():
            words = f"tc qdisc replace dev {device} root {shape}".split()
            check(where.enter_network(*words))

    def unlimit(self) -> None:
        for where, device in self._ends():
            # Fails if there is no limit.
            run(where.enter_network(*f"tc qdisc del dev {device} root".split()))

    def drop_to(self, other: Cable) -> None:
        """Silently drop every packet to ``other``; packets from there still arrive.

        The sender gets a wrong Ethernet address for ``other``, so that the kernel
        needs no firewall.
        """
        wrong = f"lladdr {_NOBODY} nud permanent dev {_NIC}"
        _ip(self._host(), *(f"neigh replace {ip} {wrong}" for ip in other.ips))

    def undrop(self) -> None:
        """Undo every ``drop_to`` of this host."""
        _ip(self._host(), f"neigh flush dev {_NIC} nud permanent")

    @property
    def ips(self) -> tuple[str, str]:
        return self._station.ipv4, self._station.ipv6

    def _ends(self) -> tuple[tuple[Namespaces, str], ...]:
        return (self._ground, self._station.name), (self._host(), _NIC)


def _ip(where: Namespaces, *commands: str) -> None:
    argv = where.enter_network("ip", "-batch", "-")
    check(argv, stdin="".join(f"{each}\n" for each in commands))


def _mac_of(ipv4: str) -> str:
    """A locally administered Ethernet address, derived from the IPv4 address."""
    octets = (2, 0, *map(int, str(ipv4).split(".")))
    return ":".join(f"{octet:02x}" for octet in octets)
