"""Finds addresses at which others may reach this host, without any name service.

Asks the kernel and the environment; which address is used is decided elsewhere.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from tfcluster.agent.proc import PROC, text_of

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
            found = str(probe.getsockname()[0])
    except OSError:
        return None
    return None if _is_local(found) else found


def local_addresses() -> list[str]:
    """Every address of this host that others can use, physical interfaces first."""
    try:
        trie = text_of(f"{PROC}/net/fib_trie")
        routes = text_of(f"{PROC}/net/route")
    except OSError:
        trie = routes = ""
    try:
        v6 = text_of(f"{PROC}/net/if_inet6")
    except OSError:
        v6 = ""
    found = ipv4_addresses(trie)
    names = interfaces(found, routes)
    found.sort(key=lambda a: names.get(a, "").startswith(_VIRTUAL))
    return found + ipv6_addresses(v6)


def ipv4_addresses(trie: str) -> list[str]:
    """Addresses in ``/proc/net/fib_trie``: leaves ``|-- A`` above ``host LOCAL``."""
    found: list[str] = []
    leaf = ""
    for line in trie.splitlines():
        words = line.split()
        if words[:1] == ["|--"]:
            leaf = words[1]
        elif "host LOCAL" in line and leaf not in found and not _is_local(leaf):
            found.append(leaf)
    return found


def ipv6_addresses(table: str) -> list[str]:
    """Global addresses in ``/proc/net/if_inet6``: hex digits, ..., scope, ..., name."""
    found = []
    for line in table.splitlines():
        words = line.split()
        if len(words) == 6 and words[3] == "00" and not words[5].startswith(_VIRTUAL):
            found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(words[0])))
    return found


def interfaces(addresses: list[str], routes: str) -> dict[str, str]:
    """Address -> interface, by the networks in ``/proc/net/route``."""
    found: dict[str, str] = {}
    for line in routes.splitlines()[1:]:
        words = line.split()
        if len(words) < 8 or words[7] == "00000000":
            continue
        network, mask = _number(words[1]), _number(words[7])
        for address in addresses:
            if _packed(address) & mask == network:
                found.setdefault(address, words[0])
    return found


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
