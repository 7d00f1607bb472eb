"""Collective operations on several hosts: shared memory and rings between hosts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from tests.kit import PYTHONPATH
from tests.kit.oracle import assert_nothing_left
from tests.rigs.testbed import Options, Testbed
from tests.rigs.testbed.fixtures import Factory
from tests.rigs.testbed.layout import REPOSITORY
from tests.runtime.harness import told
from tests.schedulers.ssh.rig_launches import USER, RigCluster

PROGRAMS = REPOSITORY / "tests" / "runtime" / "programs"
PATHS = (
    *("--set", f"env.PYTHONPATH={PYTHONPATH}"),
    *("--set", f"python={sys.executable}"),
)


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
        ("node1:3,node2:1,node3:2", 6),
        pytest.param(
            "node1:2,node2:2,node3:2,node4:2", 8, marks=pytest.mark.exhaustive
        ),
        pytest.param("node1:1,node2:1", 2, marks=pytest.mark.exhaustive),
    ],
)
def test_every_operation_on_ranks_of_several_hosts(
    cluster: RigCluster, hosts: str, count: int
) -> None:
    where = ("-n", str(count), "--hosts", hosts, "--set", "backend=ssh")
    program = str(PROGRAMS / "api_tensors.py")
    running = cluster.start(*where, *PATHS, "--", "python", program)
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


@pytest.mark.tensorflow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("hosts", ["node1,node2"])
def test_ranks_listen_on_no_port_once_they_train(
    cluster: RigCluster, hosts: str
) -> None:
    where = ("-n", "2", "--hosts", hosts, "--set", "backend=ssh")
    program = ("python", str(PROGRAMS / "listening.py"))
    running = cluster.start(*where, *PATHS, "--", *program)
    assert running.end(180) == 0, running.err
    assert "may listen" not in running.err  # no TensorFlow server
    for index in range(2):
        found = told(running.text(f"worker:{index}"), "LISTENING")
        assert found == [{"addresses": []}]
    assert_nothing_left(running)


@pytest.mark.tensorflow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("gbit", [1])
def test_a_training_over_a_slow_cable(cluster: RigCluster, gbit: int) -> None:
    hosts = cluster.rig.nodes[:2]
    for host in hosts:
        host.cable.limit(gbit * 1_000_000, burst_kib=256)
    found = cluster.folder / "found"
    where = ("-n", "2", "--hosts", "node1,node2", "--set", "backend=ssh")
    program = ("python", str(PROGRAMS / "several_hosts.py"), str(found), "fit")
    try:
        running = cluster.start(*where, *PATHS, "--", *program)
        assert running.end(180) == 0, running.err
    finally:
        for host in hosts:
            host.cable.unlimit()
    here, there = (np.load(f"{found}-{rank}.npz") for rank in range(2))
    for name in here.files:
        np.testing.assert_array_equal(here[name], there[name])
    assert here["fit/history_loss"][-1] < here["fit/history_loss"][0]
    assert_nothing_left(running)
