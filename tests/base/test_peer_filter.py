"""The program for the kernel tells strangers from the hosts of a run."""

from __future__ import annotations

import struct
from ipaddress import IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tfcluster.base.peer_filter import INSTRUCTION, admits, compact, parse, program

if TYPE_CHECKING:
    from tfcluster.base.peer_filter import Network

LOOPBACK = ("127.0.0.0/8", "::1/128")
ADDRESSES = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6))
IP_HEADER = (1 << 32) - 0x100000
RANDOM = (1 << 32) - 0x1000 + 56


@st.composite
def networks(draw: st.DrawFn) -> Network:
    address = draw(ADDRESSES)
    width = draw(st.integers(0, address.max_prefixlen))
    return ip_network((address, width), strict=False)


@st.composite
def near(draw: st.DrawFn) -> tuple[list[Network], str]:
    """Networks, and an address that is in one of them more often than by chance."""
    found = draw(st.lists(networks(), max_size=8))
    if not found or draw(st.booleans()):
        return found, str(draw(ADDRESSES))
    one = draw(st.sampled_from(found))
    return found, str(one[draw(st.integers(0, one.num_addresses - 1))])


@example((list(parse("0.0.0.0/0")), "::ffff:10.0.0.7"), 1, 0)
@given(near(), st.integers(1, 5), st.integers(0, (1 << 32) - 1))
def test_the_program_does_what_admits_says(
    found: tuple[list[Network], str], count: int, number: int
) -> None:
    admitted, source = found
    chosen = run(program(admitted, count), source, number)
    expected = number % count if admits(admitted, source) else count
    assert chosen == expected


def run(code: bytes, source: str, number: int) -> int:
    """Interpret the instructions for a packet from ``source``, as the kernel does.

    ``number`` is what the kernel draws at random.
    """
    address = ip_address(source)
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped  # its packets are those of IPv4
    header = bytearray(40)
    header[0] = address.version << 4
    start = 12 if address.version == 4 else 8
    header[start : start + len(address.packed)] = address.packed
    instructions = list(INSTRUCTION.iter_unpack(code))
    value = at = 0
    while True:
        operation, yes, no, k = instructions[at]
        at += 1
        match operation:
            case 0x30:  # BPF_LD | BPF_B | BPF_ABS
                value = header[k - IP_HEADER]
            case 0x20 if k == RANDOM:
                value = number
            case 0x20:  # BPF_LD | BPF_W | BPF_ABS
                [value] = struct.unpack_from("!I", header, k - IP_HEADER)
            case 0x74:  # BPF_ALU | BPF_RSH | BPF_K
                value >>= k
            case 0x54:  # BPF_ALU | BPF_AND | BPF_K
                value &= k
            case 0x94:  # BPF_ALU | BPF_MOD | BPF_K
                value %= k
            case 0x15:  # BPF_JMP | BPF_JEQ | BPF_K
                at += yes if value == k else no
            case 0x05:  # BPF_JMP | BPF_JA
                at += k
            case 0x06:  # BPF_RET | BPF_K
                return int(k)
            case 0x16:  # BPF_RET | BPF_A
                return value
            case _:
                raise AssertionError(f"an unknown instruction: {operation:#x}")


def test_an_address_of_ipv4_in_the_form_of_ipv6() -> None:
    assert admits(parse("10.0.0.0/24"), "::ffff:10.0.0.7")
    assert not admits(parse("10.0.0.0/24"), "::ffff:10.0.1.7")
    assert compact(["::ffff:10.0.0.7"]) == (*LOOPBACK, "10.0.0.7/32")


def test_few_hosts_are_admitted_by_address() -> None:
    found = ["10.0.0.7", "fd00::7", "fe80::1%eth0", "", "node1"]
    assert compact(found) == (*LOOPBACK, "10.0.0.7/32", "fd00::7/128", "fe80::1/128")
    assert compact([]) == LOOPBACK


def test_many_hosts_are_admitted_by_network() -> None:
    many = [f"10.0.{number // 200}.{number % 200 + 1}" for number in range(1000)]
    found = compact([*many, "fd00::1"])
    assert found == (*LOOPBACK, *(f"10.0.{n}.0/24" for n in range(5)), "fd00::/64")


@pytest.mark.parametrize("text", ["nonsense", "10.0.0.1/24", "10.0.0.0/33"])
def test_what_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text.partition("/")[0]):
        parse(f"127.0.0.0/8,{text}")
