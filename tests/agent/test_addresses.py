"""Tests of the parser for the addresses that the kernel lists."""

from __future__ import annotations

import socket

import pytest

from tfcluster.agent.host_network import (
    interfaces,
    ipv4_addresses,
    ipv6_addresses,
    local_addresses,
    source_towards,
    way_in,
)

TRIE = """\
Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 10.9.0.0
        /24 link UNICAST
Local:
  +-- 0.0.0.0/0 2 0 2
     |-- 10.9.0.1
        /32 host LOCAL
     |-- 127.0.0.1
        /32 host LOCAL
     |-- 172.17.0.1
        /32 host LOCAL
"""
ROUTES = """\
Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT
eth0\t00000000\t0100090A\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0000090A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
"""
INET6 = """\
00000000000000000000000000000001 01 80 10 80       lo
fd000000000000000000000000000002 02 40 00 80     eth0
fe80000000000000000000fffe000001 02 40 20 80     eth0
"""


def test_addresses_of_the_kernels_tables() -> None:
    assert ipv4_addresses(TRIE) == ["10.9.0.1", "172.17.0.1"]
    assert ipv6_addresses(INET6) == ["fd00::2"]
    assert interfaces(["10.9.0.1", "172.17.0.1"], ROUTES) == {
        "10.9.0.1": "eth0",
        "172.17.0.1": "docker0",
    }


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"SSH_CONNECTION": "10.0.0.1 5 10.0.0.2 22"}, "10.0.0.2"),
        ({"SSH_CONNECTION": "::1 5 ::1 22"}, None),
        ({"SSH_CONNECTION": "fe80::1%eth0 5 fd00::2 22"}, "fd00::2"),
        ({"SSH_CONNECTION": "nonsense"}, None),
        ({"SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1"}, None),
        ({}, None),
    ],
)
def test_the_way_in(environ: dict[str, str], expected: str | None) -> None:
    assert way_in(environ) == expected


def test_this_host_can_be_bound_by_its_addresses() -> None:
    for address in local_addresses():
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as probe:
            probe.bind((address, 0))
        assert source_towards(address) == address
