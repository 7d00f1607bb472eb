"""The kernel sends only the connections of strangers to the rejecting listener."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address

import pytest

from tfcluster.agent.loop import Loop
from tfcluster.agent.task_ports import ListenerGroup, RejectingListener
from tfcluster.base.peer_filter import compact, parse

SOON_S = 0.3


@contextmanager
def listeners(
    family: socket.AddressFamily = socket.AF_INET,
    *,
    count: int = 1,
    share: bool = True,
    only_ipv6: bool = False,
) -> Iterator[list[socket.socket]]:
    """Sockets that listen on one port."""
    with ExitStack() as stack:
        found: list[socket.socket] = []
        for _ in range(count):
            each = stack.enter_context(socket.socket(family))
            if share:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(only_ipv6))
            each.bind(("", found[0].getsockname()[1] if found else 0))
            each.listen()
            found.append(each)
        yield found


@contextmanager
def guarded(found: list[socket.socket], networks: str) -> Iterator[RejectingListener]:
    group = ListenerGroup.of(found[0])
    rejecting = RejectingListener(Loop(), group, len(found), parse(networks))
    try:
        yield rejecting
    finally:
        rejecting.close()


def connect(found: list[socket.socket], source: str) -> list[int]:
    """Which of the listeners get a connection from ``source``."""
    family = socket.AF_INET6 if ":" in source else socket.AF_INET
    with socket.socket(family) as client:
        client.bind((source, 0))
        to = "::1" if ":" in source else "127.0.0.1"
        client.connect((to, found[0].getsockname()[1]))
        ready = select.select(found, [], [], SOON_S)[0]
        for each in ready:
            each.accept()[0].close()
        return [found.index(each) for each in ready]


@pytest.mark.parametrize(
    ("networks", "source", "admitted"),
    [
        ("127.0.0.2/32", "127.0.0.2", True),
        ("127.0.0.2/32", "127.0.0.1", False),
        ("127.0.0.9/32,127.0.0.2/32", "127.0.0.2", True),
        ("127.0.2.0/23", "127.0.3.9", True),
        ("127.0.2.0/23", "127.0.4.1", False),
        ("::1/128", "127.0.0.1", False),
    ],
)
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_strangers_do_not_reach_the_listener(
    family: socket.AddressFamily, networks: str, source: str, admitted: bool
) -> None:
    with listeners(family) as found, guarded(found, networks):
        assert connect(found, source) == [0] * admitted


@pytest.mark.parametrize(
    ("networks", "admitted"), [("::1/128", True), ("::/64", True), ("::2/128", False)]
)
@pytest.mark.parametrize("only_ipv6", [False, True])
def test_addresses_of_ipv6(networks: str, admitted: bool, only_ipv6: bool) -> None:
    with (
        listeners(socket.AF_INET6, only_ipv6=only_ipv6) as found,
        guarded(found, networks),
    ):
        assert connect(found, "::1") == [0] * admitted


def test_several_listeners_share_what_is_admitted() -> None:
    with listeners(count=3) as found, guarded(found, "127.0.0.2/32"):
        chosen = [connect(found, "127.0.0.2") for _ in range(60)]
        assert {len(each) for each in chosen} == {1}
        assert {each[0] for each in chosen} == {0, 1, 2}
        assert not connect(found, "127.0.0.1")


def test_without_it_everybody_is_admitted_again() -> None:
    with listeners() as found:
        with guarded(found, "127.0.0.2/32"):
            assert not connect(found, "127.0.0.1")
        assert connect(found, "127.0.0.1") == [0]


def test_a_listener_that_shares_its_port_with_nobody_cannot_be_guarded() -> None:
    with (
        listeners(share=False) as found,
        pytest.raises(OSError, match="in use"),
        guarded(found, "127.0.0.2/32"),
    ):
        pass


@pytest.mark.parametrize("count", [126, 127, 20_000])
def test_the_kernel_takes_a_program_for_any_number_of_hosts(count: int) -> None:
    numbers = [(index * 2_654_435_761) % (1 << 32) for index in range(count)]
    addresses = [str(ip_address(number)) for number in numbers]
    addresses += [f"fd00:{number % 60000:x}::1" for number in numbers[:40]]
    with listeners() as found, guarded(found, ",".join(compact(addresses))):
        assert connect(found, "127.0.0.1") == [0]
