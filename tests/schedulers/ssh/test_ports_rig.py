"""TensorFlow's servers answer the hosts of the run, and no other machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.oracle import assert_nothing_left
from tests.rigs.testbed import Options, Testbed
from tests.rigs.testbed.fixtures import Factory
from tests.schedulers.ssh.rig_launches import USER, RigCluster
from tests.schedulers.ssh.test_collective_rig import PATHS, PROGRAMS

# A server of TensorFlow does not hang up on a client that says nothing.
CONNECT = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) as link:
    link.settimeout(1)
    try:
        sys.exit(7 if link.recv(1) == b"" else 0)
    except TimeoutError:
        sys.exit(0)
"""
ANSWERED, REJECTED = 0, 7

# The ports on which others can connect to this host, but for sshd's.
PORTS = """
from pathlib import Path
LISTEN, LOOPBACK = "0A", "0100007F"
found = set()
for name in ("tcp", "tcp6"):
    for line in Path("/proc/net", name).read_text().splitlines()[1:]:
        words = line.split()
        host, _, port = words[1].partition(":")
        if words[3] == LISTEN and host != LOOPBACK:
            found.add(int(port, 16))
print(*sorted(found - {22}))
"""


@pytest.fixture(scope="module")
def rig(testbed_factory: Factory) -> Testbed:
    return testbed_factory(Options(nodes=2))


@pytest.fixture
def cluster(rig: Testbed, request: pytest.FixtureRequest) -> Iterator[RigCluster]:
    cluster = RigCluster(rig, rig.accounts[USER].home / request.node.callspec.id)
    yield cluster
    cluster.end()


def answers(rig: Testbed) -> list[int]:
    """What the login host, which is not part of the run, gets at each open port."""
    return [
        rig.login.run(
            ("python3", "-c", CONNECT, node.address, port), user=USER
        ).returncode
        for node in rig.nodes
        for port in node.output(("python3", "-c", PORTS), user=USER).split()
    ]


@pytest.mark.tensorflow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("strategy", "expose", "expected"),
    [
        # Each worker starts a server, and uses those of the other tasks and the ps.
        ("none", "run", [REJECTED] * 3),
        ("none", "any", [ANSWERED] * 3),
        # A server for each worker, a dispatcher, and a worker of the data service.
        ("collective", "run", [REJECTED] * 4),
    ],
)
def test_another_machine_reaches_no_server_of_tensorflow(
    cluster: RigCluster, strategy: str, expose: str, expected: list[int]
) -> None:
    own = strategy == "none"
    done = cluster.folder / "done"
    program = str(PROGRAMS / ("own_servers.py" if own else "served_training.py"))
    running = cluster.start(
        *("-n", "2", "--hosts", "node1,node2", "--set", "backend=ssh"),
        *("--set", "tasks.ps=1" if own else "tasks.data=1"),
        *("--set", f"runtime.strategy={strategy}"),
        *(() if own else ("--set", "runtime.transport=tensorflow")),
        *("--set", f"ports.expose={expose}", *PATHS),
        *("--", "python", program, str(done)),
    )
    running.wait_for_text("READY", "worker:0", "worker:1", timeout_s=120)
    assert answers(cluster.rig) == expected
    done.touch()
    assert running.end(60) == 0, running.err
    only = "accept commands from every user of these hosts"
    assert (only in running.err) is (expose == "run")
    assert ("from any client" in running.err) is (expose == "any")
    assert_nothing_left(running)
