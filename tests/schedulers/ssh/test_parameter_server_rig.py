"""Parameter servers on several hosts: each worker reaches one over the network."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest

from tests.kit import PYTHONPATH
from tests.kit.oracle import assert_nothing_left
from tests.rigs.testbed import Options, Testbed
from tests.rigs.testbed.fixtures import Factory
from tests.rigs.testbed.layout import REPOSITORY
from tests.schedulers.ssh.rig_launches import USER, RigCluster

DIGITS = REPOSITORY / "examples" / "digits.py"


@pytest.fixture(scope="module")
def rig(testbed_factory: Factory) -> Testbed:
    return testbed_factory(Options(nodes=4))


@pytest.fixture
def cluster(rig: Testbed, request: pytest.FixtureRequest) -> Iterator[RigCluster]:
    cluster = RigCluster(
        rig, rig.accounts[USER].home / request.node.name.replace("[", "-")[:-1]
    )
    yield cluster
    cluster.end()


@pytest.mark.tensorflow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["parameter_server", "replicated"])
def test_workers_train_with_servers_on_several_hosts(
    cluster: RigCluster, strategy: str
) -> None:
    settings = (
        "backend=ssh",
        f"env.PYTHONPATH={PYTHONPATH}",
        f"python={sys.executable}",
        f"runtime.strategy={strategy}",
    )
    words = [word for each in settings for word in ("--set", each)]
    where = ("-n", "2", "--ps", "2", "--hosts", "node1,node2,node3,node4")
    script = (str(DIGITS), "--epochs", "2")
    running = cluster.start(*where, *words, "--", "python", *script)
    assert running.end(380) == 0, running.err
    report = running.report()
    hosts = {task["task"]: task["host"] for task in report["tasks"]}
    # Each worker uses one ps on its host by shared memory, and one on another host.
    assert {hosts["worker:0"], hosts["worker:1"]} == {hosts["ps:0"], hosts["ps:1"]}
    assert hosts["ps:0"] != hosts["ps:1"]
    found = re.findall(r"val_accuracy: ([\d.]+)", running.text("worker:0"))
    # There are ten digits, so chance gives 0.1.
    assert float(found[-1]) > 0.5
    assert_nothing_left(running)
