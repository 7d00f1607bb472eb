"""Tests of the digits example over TensorFlow's collective ops in a real launch."""

from __future__ import annotations

import re

import pytest

from tests.kit.cluster import Cluster
from tests.kit.oracle import assert_nothing_left
from tests.runtime.harness import told
from tfcluster.base.isolated_import import PACKAGE_ROOT

DIGITS = f"{PACKAGE_ROOT}/examples/digits.py"
LISTENING = f"{PACKAGE_ROOT}/tests/runtime/programs/listening.py"
PS_PORTS = f"{PACKAGE_ROOT}/tests/runtime/programs/ps_ports.py"
CONNECTS = f"{PACKAGE_ROOT}/tests/runtime/programs/connects.py"


def figures(cluster: Cluster, *options: str) -> list[str]:
    """Run the example and return the results that the chief prints."""
    running = cluster.start(*options, "--", "python", DIGITS, "--epochs", "1")
    assert running.end(timeout_s=80) == 0
    exposed = "ports.expose=any" in options
    assert ("TensorFlow servers may listen" in running.err) == exposed
    assert_nothing_left(running)
    text = running.text("worker:0")
    return [m[0] for m in re.finditer(r"(accuracy|loss):? [\d.]+", text)]


@pytest.mark.exhaustive
@pytest.mark.tensorflow
@pytest.mark.timeout(180)
def test_digits_over_tensorflow(cluster: Cluster) -> None:
    words = ("--set", "runtime.transport=tensorflow", "--set", "ports.expose=any")
    two = figures(cluster, "-n", "2", *words)
    assert len(two) == 6
    assert two == figures(cluster, "-n", "1")


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.timeout(120)
def test_ranks_on_one_host_listen_on_no_port(cluster: Cluster) -> None:
    running = cluster.start("-n", "2", "--", "python", LISTENING)
    assert running.end(timeout_s=100) == 0, running.err
    for index in range(2):
        found = told(running.text(f"worker:{index}"), "LISTENING")
        assert found == [{"addresses": []}]
    assert "may listen" not in running.err


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["parameter_server", "replicated"])
def test_a_ps_of_keras_runs_no_server_of_tensorflow(
    cluster: Cluster, strategy: str
) -> None:
    words = ("-n", "2", "--ps", "1", "--set", f"runtime.strategy={strategy}")
    running = cluster.start(*words, "--", "python", PS_PORTS)
    assert running.end(timeout_s=100) == 0, running.err
    for index in range(2):
        (found,) = told(running.text(f"worker:{index}"), "PORTS")
        assert found == {"tensorflow": False, "ours": True}
    assert "TensorFlow's server" not in running.err
    assert "may listen" not in running.err
    assert_nothing_left(running)


@pytest.mark.slow
@pytest.mark.tensorflow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("way", ["eager", "session"])
def test_a_program_that_connects_to_a_ps_finds_its_server(
    cluster: Cluster, way: str
) -> None:
    words = ("-n", "1", "--ps", "1", "--set", "runtime.strategy=parameter_server")
    more = ("--set", "runtime.require_exchange=false")
    running = cluster.start(*words, *more, "--", "python", CONNECTS, way)
    assert running.end(timeout_s=100) == 0, running.err
    (found,) = told(running.text("worker:0"), "FOUND")
    assert found == {"value": 6.0}
    assert "ps:0: the program uses TensorFlow's server of this ps" in running.err


@pytest.mark.tensorflow
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_auto_is_host_if_tensorflow_cannot_use_the_gpus(cluster: Cluster) -> None:
    """The launcher believes CUDA_VISIBLE_DEVICES; TensorFlow finds no such GPU."""
    exposed = ("--set", "ports.expose=any")
    words = ["-n", "2", *exposed, "--", "python", DIGITS, "--epochs", "1"]
    running = cluster.start(*words, environ={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert running.end(timeout_s=80) == 0
    assert "transport: tensorflow, because each rank has a GPU to itself" in running.err
    assert "TensorFlow servers may listen" in running.err
    why = "transport: host, because rank 0 has no GPU that TensorFlow can use"
    assert why in running.err
    assert_nothing_left(running)
