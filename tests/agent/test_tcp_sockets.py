"""The kernel tells by netlink what /proc has as well."""

from __future__ import annotations

import os
import socket

import pytest

from tfcluster.agent.tcp_sockets import Listener, from_proc, listeners


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_listener_is_found_both_ways(family: socket.AddressFamily) -> None:
    with socket.socket(family) as found, socket.socket(family) as bound:
        found.bind(("", 0))
        found.listen()
        bound.bind(("", 0))  # without listening
        inode = os.fstat(found.fileno()).st_ino
        expected = Listener(found.getsockname()[1], os.geteuid(), inode)
        for all_found in (listeners(), from_proc()):
            assert expected in all_found
            assert os.fstat(bound.fileno()).st_ino not in {e.inode for e in all_found}


def test_many_listeners_are_all_found() -> None:
    found = []
    try:
        for _ in range(800):  # more than one answer of the kernel
            each = socket.socket()
            found.append(each)
            each.bind(("127.0.0.1", 0))
            each.listen()
        inodes = {os.fstat(each.fileno()).st_ino for each in found}
        assert inodes <= {each.inode for each in listeners()}
    finally:
        for each in found:
            each.close()


def test_proc_is_read_where_there_is_no_netlink(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tfcluster.agent.tcp_sockets._NETLINK_SOCK_DIAG", 31)
    with socket.socket() as found:
        found.bind(("", 0))
        found.listen()
        assert found.getsockname()[1] in {each.port for each in listeners()}
