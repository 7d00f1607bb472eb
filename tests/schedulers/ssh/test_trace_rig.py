"""Traces of ranks on two hosts: recorded through the agents, placed on one clock."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.kit import PYTHONPATH
from tests.kit.oracle import assert_nothing_left
from tests.launch.test_trace import (
    KERAS,
    STEPS,
    assert_is_that_of_the_keras_program,
    spans,
    traced,
)
from tests.rigs.testbed import Options, Testbed
from tests.rigs.testbed.fixtures import Factory
from tests.schedulers.ssh.rig_launches import USER, RigCluster


@pytest.fixture(scope="module")
def rig(testbed_factory: Factory) -> Testbed:
    return testbed_factory(Options(nodes=2))


@pytest.fixture
def cluster(rig: Testbed, request: pytest.FixtureRequest) -> Iterator[RigCluster]:
    cluster = RigCluster(rig, rig.accounts[USER].home / request.node.name)
    yield cluster
    cluster.end()


@pytest.mark.tensorflow
@pytest.mark.timeout(400)
def test_ranks_on_two_hosts_have_one_clock(cluster: RigCluster) -> None:
    (cluster.folder / "train.py").write_text(KERAS)
    settings = (
        "backend=ssh",
        f"env.PYTHONPATH={PYTHONPATH}",
        f"python={sys.executable}",
    )
    words = [word for each in settings for word in ("--set", each)]
    where = ("-n", "2", "--hosts", "node1,node2")
    running = cluster.start("--trace", *where, *words, "--", "python", "train.py")
    assert running.end(380) == 0, running.err
    trace = traced(running)
    assert_is_that_of_the_keras_program(trace, "exchange 1 of multi_step_on_iterator")
    for host in ("node1", "node2"):
        stages = trace.names(f"host {host}", "start-up")
        assert stages[0] == "wait for its turn"
        wanted = {"connect", "resolve the name", "start the agent", "import TensorFlow"}
        assert wanted <= set(stages)
    assert trace.facts["clock_uncertainty_ms"].keys() == {"node1", "node2"}
    # The hosts are namespaces of one machine: they really have one clock.
    last = {event["host"]: event for event in running.found("clock")}
    one, two = last["node1"], last["node2"]
    apart_s = abs(one["offset_s"] - two["offset_s"])
    assert apart_s <= one["uncertainty_s"] + two["uncertainty_s"]
    # So what belongs together is seen at the same time.
    steps = [spans(trace, name, "steps") for name in ("worker:0", "worker:1")]
    assert len(steps[0]) == len(steps[1]) == STEPS
    for mine, other in zip(*steps, strict=True):
        assert abs(mine["ts"] + mine["dur"] - other["ts"] - other["dur"]) < 500_000
    assert_nothing_left(running)
