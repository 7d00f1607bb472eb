"""The channel to a process on an SSH host: what has arrived and was not read."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.kit.waiting import eventually
from tests.schedulers.ssh.conftest import Site
from tests.schedulers.ssh.server import USER
from tfcluster.plan.model import Host, Ssh
from tfcluster.schedulers.ssh.config import parse
from tfcluster.schedulers.ssh.connect import SshConnections, open_session
from tfcluster.schedulers.ssh.route import Sources, route
from tfcluster.schedulers.ssh.starter import SshChannel
from tfcluster.schedulers.starting import is_readable

SOON_S = 20.0


def opened(site: Site, host: str, command: str) -> SshChannel:
    config = site.ssh / "config"
    sources = Sources(
        directives=parse(str(config), config.read_text(), lambda pattern: ()),
        ssh=Ssh(),
        timeout_given=False,
        home=Path(site.cluster.environ["HOME"]),
        me=USER,
    )
    way = route(Host(name=host), sources)
    transport = SshConnections().open(way)
    session = open_session(transport, way)
    session.exec_command(command)
    return SshChannel("python", session, transport.close)


@pytest.mark.parametrize("extra", [(), ("ProxyJump gate",)], ids=["direct", "jump"])
def test_output_is_unread_until_it_is_read(site: Site, extra: tuple[str, ...]) -> None:
    site.host("gate")
    site.host("one", extra=extra)
    channel = opened(site, "one", "read line; echo $line; exec cat")
    eventually(lambda: not channel.has_unread(), lambda: "it is silent", SOON_S)
    channel.write(b"hello\n")
    eventually(channel.has_unread, lambda: "nothing arrives", SOON_S)
    assert channel.read() == b"hello\n"
    eventually(lambda: not channel.has_unread(), lambda: "all was read", SOON_S)
    channel.close()
    channel.kill()


def test_a_descriptor_is_readable_with_data_and_at_its_end() -> None:
    ours, theirs = socket.socketpair()
    assert not is_readable(ours.fileno())
    theirs.send(b"x")
    assert is_readable(ours.fileno())
    ours.recv(1)
    assert not is_readable(ours.fileno())
    theirs.close()
    assert is_readable(ours.fileno())
    number = os.dup(ours.fileno())
    os.close(number)
    ours.close()
    assert not is_readable(number)
    assert not is_readable(ours.fileno())
