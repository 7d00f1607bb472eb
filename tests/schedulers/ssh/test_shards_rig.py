"""``runtime.shards`` on several hosts: a lost host changes no bit of the weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.kit.oracle import assert_nothing_left
from tests.kit.waiting import eventually
from tests.launch.test_shards import DIGITS, WORDS
from tests.rigs.testbed import Options, Testbed
from tests.rigs.testbed.fixtures import Factory
from tests.schedulers.ssh.rig_launches import RigCluster
from tests.schedulers.ssh.test_collective_rig import PATHS

PROGRAMS = {"digits": DIGITS, "words": WORDS}
EPOCHS = 12


@pytest.fixture(scope="module")
def rig(testbed_factory: Factory) -> Testbed:
    return testbed_factory(Options(nodes=4))


@pytest.fixture
def cluster(rig: Testbed, request: pytest.FixtureRequest) -> Iterator[RigCluster]:
    cluster = RigCluster(
        rig, rig.accounts["alice"].home / f"shards-{request.node.callspec.id}"
    )
    program = PROGRAMS[request.node.callspec.params["name"]]
    text = program.replace("epochs=3", f"epochs={EPOCHS}")
    (cluster.folder / "train.py").write_text(text)
    yield cluster
    cluster.end()
    rig.repair()


def weights(cluster: RigCluster, count: int, loses: bool) -> set[str]:
    """Hashes of the weights that the ranks have at the end of a run on ``count`` hosts.

    With ``loses``, the last host loses its power in the second epoch.
    """
    hosts = ",".join(host.name for host in cluster.rig.nodes[:count])
    running = cluster.start(
        *("-n", str(count), "--hosts", hosts, "--set", "backend=ssh"),
        *("--set", "runtime.shards=4", "--set", "env.LOSES=none", *PATHS),
        *("--set", "restart.max=1", "--set", f"tasks.worker.min={max(1, count - 1)}"),
        *("--", sys.executable, "train.py"),
    )
    if loses:
        begun = "epoch 1"
        eventually(
            lambda: begun in running.text("worker:0"), lambda: running.err, 120.0
        )
        cluster.rig.nodes[count - 1].power_off()
    assert running.end(400) == 0, running.err
    assert ("restart 1 of 1" in running.err) == loses
    left = count - 1 if loses else count
    said = [running.text(f"worker:{rank}") for rank in range(left)]
    if not loses:
        assert_nothing_left(running)
    return {each.rpartition("weights ")[2].strip() for each in said}


@pytest.mark.exhaustive
@pytest.mark.testbed
@pytest.mark.tensorflow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PROGRAMS)
def test_neither_the_number_of_hosts_nor_a_lost_one_changes_a_bit(
    cluster: RigCluster, name: str
) -> None:
    found = weights(cluster, 3, loses=True)
    for count in (1, 2, 3, 4):
        cluster.rig.repair()
        found |= weights(cluster, count, loses=False)
    assert len(found) == 1, found
    assert len(found.pop()) == 64
