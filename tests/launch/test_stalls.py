"""Tests of collectives in a real launch: late, killed and failing ranks, and MPI."""

from __future__ import annotations

import importlib.util
import os
import re
import signal

import pytest

from tests.kit.cluster import Cluster, Running
from tests.kit.oracle import assert_nothing_left
from tests.launch.test_trace import traced
from tfcluster.base.isolated_import import PACKAGE_ROOT

RANKS = """
import os, threading
import numpy as np
import tfcluster.runtime as tfc
from tfcluster.runtime import process_group
from tfcluster.runtime.collective import Signature, ReduceOp
from tfcluster.runtime.collective.collectives import reduce_arrays

def reads_its_data():
    while not os.path.exists('go'):
        threading.Event().wait(0.05)

tfc.init()
tfc.barrier()
print('up', flush=True)
"""
LATE = """
if tfc.rank() == 2:
    reads_its_data()
reduce_arrays(
    process_group.group(), [np.ones(9)], ReduceOp.SUM, Signature("gradients of adam")
)
print('through', flush=True)
"""
ENDLESS = """
while True:
    layout = Signature('gradients')
    reduce_arrays(process_group.group(), [np.ones(9)], ReduceOp.SUM, layout)
"""
FAILING = """
if tfc.rank() == 2:
    raise ValueError('boom')
tfc.barrier()
"""


def started(cluster: Cluster, code: str, *options: str, count: int = 3) -> Running:
    (cluster.folder / "ranks.py").write_text(RANKS + code)
    settings = ["runtime.warm_start=false", *options]
    words = [word for setting in settings for word in ("--set", setting)]
    running = cluster.start("-n", str(count), *words, "--", "python", "ranks.py")
    return running.up(count=count)


def test_a_late_rank_is_named_and_shows_where_it_is(cluster: Cluster) -> None:
    running = started(cluster, LATE, "runtime.stall_warning=1s")
    running.wait_for_text("It is here:", "worker:2")
    running.wait_for_text("rank 2 has not entered", "worker:0")
    (cluster.folder / "go").touch()
    assert running.end() == 0
    assert re.search(
        r"tfcluster: rank 2 has not entered exchange 2: gradients of adam "
        r"\(waiting for \d s\); its last exchange was 1: barrier, \d s ago\n",
        running.text("worker:0"),
    )
    shown = running.text("worker:2")
    assert "in reads_its_data" in shown
    assert "tfcluster/runtime" not in shown
    assert "has not entered" not in running.text("worker:1")
    waiting = running.found("waiting", task="worker:0")[0]
    assert waiting["what"] == "gradients of adam"
    assert waiting["for"] == [2]
    assert waiting["since_s"] >= 1
    assert not running.found("waiting", task="worker:1")
    stalls = traced(running).names("worker:0 on localhost", "stalls")
    assert stalls == ["waits in gradients of adam"]
    assert_nothing_left(running)


def test_a_rank_that_never_comes_fails_the_run(cluster: Cluster) -> None:
    options = ("runtime.stall_warning=1s", "runtime.stall_timeout=3s")
    running = started(cluster, LATE, *options)
    assert running.end() == 1
    first = running.report()["first_failure"]
    assert first["task"] in ("worker:0", "worker:1")
    assert "CollectiveTimeoutError" in "\n".join(first["log_tail"])
    assert "rank 2 has sent nothing for 3 s; rank 2 has not entered" in first["cause"]
    assert_nothing_left(running)


@pytest.mark.parametrize("transport", ["host", "mpi"])
def test_a_killed_rank_is_the_first_failure(cluster: Cluster, transport: str) -> None:
    if transport == "mpi" and importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed: pip install 'tfcluster[mpi]'")
    running = started(cluster, ENDLESS, f"runtime.transport={transport}")
    pid = running.wait_for("task", task="worker:1", state="running")["pid"]
    os.kill(pid, signal.SIGKILL)
    assert running.end() == 1
    first = running.report()["first_failure"]
    assert (first["task"], first["signal"]) == ("worker:1", "SIGKILL")
    for task in ("worker:0", "worker:2"):
        assert "PeerLostError: rank 1 has left" in running.text(task)
    assert_nothing_left(running)


def test_why_a_rank_has_failed_is_reported_to_the_others(cluster: Cluster) -> None:
    running = started(cluster, FAILING)
    assert running.end() == 1
    first = running.report()["first_failure"]
    assert first["task"] == "worker:2"
    assert first["cause"] == "ValueError: boom"
    for task in ("worker:0", "worker:1"):
        assert (
            "PeerLostError: rank 2 has left after exchange 1: its program has ended: "
            "ValueError: boom (in exchange 2: barrier)" in running.text(task)
        )


@pytest.mark.exhaustive
@pytest.mark.tensorflow
@pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None,
    reason="mpi4py is not installed: pip install 'tfcluster[mpi]'",
)
def test_the_digits_are_learnt_over_mpi(cluster: Cluster) -> None:
    said = []
    for transport in ("mpi", "host"):
        running = cluster.start(
            *("-n", "2", "--set", f"runtime.transport={transport}", "--"),
            *("python", f"{PACKAGE_ROOT}/examples/digits.py", "--epochs", "1"),
        )
        assert running.end(60) == 0, running.err
        said.append(re.findall("validation loss.*", running.text("worker:1")))
    assert len(said[0]) == 1
    assert said[0] == said[1]
