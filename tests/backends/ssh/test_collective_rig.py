"""Collective operations on several hosts: shared memory and rings between hosts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from tests.backends.ssh.rig_launches import USER, RigCluster
from tests.launch.oracle import assert_nothing_left
from tests.testbed import Options, Testbed
from tests.testbed.fixtures import Factory
from tests.testbed.layout import REPOSITORY

PROGRAM = REPOSITORY / "tests" / "runtime" / "programs" / "api_tensors.py"


@pytest.fixture(scope="module")
def rig(testbed_factory: Factory) -> Testbed:
    return testbed_factory(Options(nodes=4))


@pytest.fixture
def cluster(rig: Testbed, request: pytest.FixtureRequest) -> Iterator[RigCluster]:
    name = request.node.callspec.id.replace(":", "-").replace(",", "-")
    cluster = RigCluster(rig, rig.accounts[USER].home / name)
    yield cluster
    cluster.end()


@pytest.mark.tensorflow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("hosts", "count"),
    [
        ("node1:2,node2:2,node3:2,node4:2", 8),
        ("node1:3,node2:1,node3:2", 6),
        ("node1:1,node2:1", 2),
    ],
)
def test_every_operation_on_ranks_of_several_hosts(
    cluster: RigCluster, hosts: str, count: int
) -> None:
    where = ("-n", str(count), "--hosts", hosts, "--set", "backend=ssh")
    paths = (
        "--set",
        f"env.PYTHONPATH={REPOSITORY}",
        "--set",
        f"python={sys.executable}",
    )
    running = cluster.start(*where, *paths, "--", "python", str(PROGRAM))
    assert running.end(280) == 0, running.err
    for index in range(count):
        lines = running.text(f"worker:{index}").splitlines()
        said = next(line for line in reversed(lines) if line.startswith('{"'))
        found = json.loads(said)
        del found["ranks"]  # this check expects all ranks on one host
        failed = {name: text for name, text in found.items() if text != "ok"}
        assert not failed, f"worker:{index}: {failed}"
        assert len(found) > 20
    assert_nothing_left(running)
