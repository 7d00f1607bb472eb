"""Which machines may connect to a port: networks, and a program for the kernel.

The program is classic BPF (Linux's Documentation/networking/filter.rst). It chooses one
of the sockets that listen on one port: SO_ATTACH_REUSEPORT_CBPF in socket(7). Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
    from typing import TypeAlias

    Network: TypeAlias = IPv4Network | IPv6Network
    Instruction: TypeAlias = tuple[int, int, int, int]
    """Operation, jumps if true and if false, and a number."""

MOST_NETWORKS = 128
"""A program for more could exceed the limit of older kernels (optmem_max, 20 KiB)."""

INSTRUCTION = struct.Struct("=HBBI")

_LOOPBACK = ("127.0.0.0/8", "::1/128")
_WIDTHS = ((32, 128), (24, 64), (16, 48), (8, 32))
"""Prefix lengths for IPv4 and IPv6, from single addresses to wide networks."""

_IP_HEADER = (1 << 32) - 0x100000  # SKF_NET_OFF
_RANDOM = (1 << 32) - 0x1000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM
_SOURCE_4, _SOURCE_6 = 12, 8  # offsets of the source address in the IP header
_LOAD_BYTE, _LOAD_WORD, _SHIFT, _AND, _MODULO = 0x30, 0x20, 0x74, 0x54, 0x94
_EQUAL, _GO, _RETURN, _RETURN_LOADED = 0x15, 0x05, 0x06, 0x16
_WHOLE = (1 << 32) - 1
_ADMIT = (_GO, 0, 0, _WHOLE)
"""Stands for a jump to the end of the program, whose position is not known yet."""


def compact(addresses: Iterable[str]) -> tuple[str, ...]:
    """At most MOST_NETWORKS networks (CIDR) of these addresses, and loopback."""
    from ipaddress import ip_network

    parsed = set()
    for text in addresses:
        try:
            parsed.add(_address(text))
        except ValueError:
            continue
    for widths in _WIDTHS:
        networks = {
            str(ip_network((address, widths[address.version == 6]), strict=False))
            for address in parsed
        }
        if len(networks) <= MOST_NETWORKS - len(_LOOPBACK):
            break
    return (*_LOOPBACK, *sorted(networks))


def parse(text: str) -> tuple[Network, ...]:
    """Networks in CIDR form, separated by commas. Raises ValueError for other text."""
    from ipaddress import ip_network

    return tuple(ip_network(network) for network in text.split(",") if network)


def admits(networks: Iterable[Network], address: str) -> bool:
    """Whether an IP address, or an IPv4 address in IPv6 form, is in a network."""
    parsed = _address(address)
    return any(
        parsed.version == network.version and parsed in network for network in networks
    )


def _address(text: str) -> IPv4Address | IPv6Address:
    """An address without its zone; an IPv4 address in IPv6 form becomes IPv4.

    Packets for such an address are IPv4. Raises ValueError if it is not an address.
    """
    from ipaddress import ip_address

    address = ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def program(networks: Iterable[Network], count: int) -> bytes:
    """The instructions, 8 bytes each, for a group of ``count`` + 1 sockets.

    One of the first ``count`` sockets, at random, gets the connections from
    ``networks``, and the last socket gets all others.
    """
    parts: dict[int, list[Instruction]] = {4: [], 6: []}
    for network in networks:
        start = _SOURCE_4 if network.version == 4 else _SOURCE_6
        parts[network.version] += _admit(
            start, network.network_address.packed, network.netmask.packed
        )
    refuse = (_RETURN, 0, 0, count)
    code = [
        (_LOAD_BYTE, 0, 0, _IP_HEADER),
        (_SHIFT, 0, 0, 4),
        (_EQUAL, 1, 0, 4),  # the version of IP
        (_GO, 0, 0, len(parts[4]) + 1),
        *parts[4],
        refuse,
        *parts[6],
        refuse,
    ]
    code = [
        (_GO, 0, 0, len(code) - at - 1) if instruction == _ADMIT else instruction
        for at, instruction in enumerate(code)
    ]
    code += [
        (_LOAD_WORD, 0, 0, _RANDOM),
        (_MODULO, 0, 0, count),
        (_RETURN_LOADED, 0, 0, 0),
    ]
    return b"".join(INSTRUCTION.pack(*instruction) for instruction in code)


def _admit(start: int, address: bytes, mask: bytes) -> Iterator[Instruction]:
    """Go to the end if the source is in this network, else to the next instruction."""
    words = [
        (start + 4 * index, value, bits)
        for index, (value, bits) in enumerate(
            zip(_words(address), _words(mask), strict=True)
        )
        if bits
    ]
    sizes = [3 if bits != _WHOLE else 2 for _, _, bits in words]
    for index, (offset, value, bits) in enumerate(words):
        yield (_LOAD_WORD, 0, 0, _IP_HEADER + offset)
        if bits != _WHOLE:
            yield (_AND, 0, 0, bits)
        yield (_EQUAL, 0, sum(sizes[index + 1 :]) + 1, value)
    yield _ADMIT


def _words(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"!{len(data) // 4}I", data)
