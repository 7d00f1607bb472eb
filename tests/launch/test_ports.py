"""Tests that nothing is started with a port that is not available."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.kit.cluster import Cluster, plain
from tests.kit.machine import listening_ports
from tests.kit.oracle import assert_nothing_left
from tests.kit.waiting import eventually

COUNT = 3


@pytest.fixture
def taken() -> Iterator[tuple[int, list[socket.socket]]]:
    """Listen on some neighbouring ports; yields the first port and the sockets."""
    with ExitStack() as stack:
        for low in range(41000, 60000, COUNT):
            held = [stack.enter_context(socket.socket()) for _ in range(COUNT)]
            try:
                for number, each in enumerate(held):
                    each.bind(("", low + number))
                    each.listen()
            except OSError:
                continue
            yield low, held
            return


@pytest.mark.parametrize("free", [0, 1])
def test_too_few_free_ports_are_named_before_anything_starts(
    cluster: Cluster, taken: tuple[int, list[socket.socket]], free: int
) -> None:
    low, held = taken
    for each in held[:free]:
        each.close()
    ports = f"ports={low}-{low + COUNT - 1}"
    options = plain("--set", ports, count=2)
    running = cluster.start(*options, "--", "sh", "-c", "echo $TF_CONFIG")
    assert running.end() == 4
    cause = f"only {free} of 2 ports between {low} and {low + COUNT - 1} are free"
    assert cause in running.report()["first_failure"]["cause"]
    assert "'ports'" in running.err
    assert running.out == ""
    assert_nothing_left(running)


LATE_SERVER = """
import json, os, pathlib, socket, time
print('up', flush=True)
while not pathlib.Path('go').exists():
    time.sleep(0.02)
task = json.loads(os.environ['TF_CONFIG'])
port = int(task['cluster']['worker'][0].rpartition(':')[2])
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
server.bind(('127.0.0.1', port))
server.listen()
while not pathlib.Path('end').exists():
    time.sleep(0.02)
"""


def test_a_script_that_shares_its_port_with_a_foreign_process_fails(
    cluster: Cluster,
) -> None:
    """The kernel would spread connections over both listeners."""
    running = cluster.python(LATE_SERVER).up()
    port = int(running.status()["tasks"][0]["address"].rpartition(":")[2])
    with socket.socket() as intruder:
        intruder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        intruder.bind(("127.0.0.1", port))
        intruder.listen()
        listener = f"pid {os.getpid()}, which worker:0 did not start, listens on"
        running.wait_for_err(f"\nwarning: localhost: {listener} port {port}")
        (cluster.folder / "go").touch()
        assert running.end() == 4
    first = running.report()["first_failure"]
    assert (first["task"], first["cause"]) == (
        "worker:0",
        f"its port {port} is held by pid {os.getpid()}",
    )
    assert_nothing_left(running)


def test_a_script_alone_on_its_port_is_well(cluster: Cluster) -> None:
    running = cluster.python(LATE_SERVER).up()
    port = int(running.status()["tasks"][0]["address"].rpartition(":")[2])
    (cluster.folder / "go").touch()
    eventually(lambda: port in listening_ports(), lambda: running.err, 40)
    (cluster.folder / "end").touch()
    assert running.end() == 0, running.err
    assert "listens on port" not in running.err
    assert_nothing_left(running)
