"""Tests of the ps tasks of a launched run: what they cost, and what is reported."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from tests.kit.cluster import Cluster
from tests.kit.oracle import assert_nothing_left
from tests.kit.time_limits import allow_s

PROGRAM = """
import os, time
import numpy as np
import tensorflow as tf
from tfcluster.runtime.context import context_from
from tfcluster.runtime.parameter_server.client import (
    ModelVariable,
    ParameterServerClient,
)
from tfcluster.runtime.parameter_server.update_graph import serialised

context = context_from(os.environ)
servers = ParameterServerClient(
    context.parameter_servers,
    rank=context.rank, size=context.size, token=context.token,
)
variables = [ModelVariable("kernel", "float32", (1000, 100))]

def pack(pieces, kinds):
    shadows = [tf.Variable(tf.zeros([p.end - p.start, 100])) for p in pieces]
    def apply(gradients):
        for shadow, gradient in zip(shadows, gradients):
            shadow.assign_sub(gradient)
    return serialised(apply, shadows, {}, kinds)

zeros = np.zeros((1000, 100), np.float32)
servers.open("model", variables, [zeros], "d", pack, splittable=True)
for _ in range(25):
    (value,) = servers.push("model", [zeros + 1])
print("all is pushed", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
(value,) = servers.pull("model")
assert (value == -50).all(), value
print("all of it was applied", flush=True)
"""
IDLE_S = 1.5
DEADLINE_S = 120.0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_ps_tasks_serve_cost_little_and_end_with_the_others(cluster: Cluster) -> None:
    (cluster.folder / "train.py").write_text(PROGRAM)
    config = {
        "command": "python train.py",
        "tasks": {"worker": 2, "ps": 2},
        "env": {"TF_CPP_MIN_LOG_LEVEL": "3"},
        # The program pushes with the client directly, below the hooks that report an
        # exchange.
        "runtime": {"require_exchange": False},
    }
    running = cluster.start(cluster.file(json.dumps(config)))
    pids = []
    for name in ("ps:0", "ps:1"):
        event = running.wait_for(
            "task", task=name, state="running", timeout_s=DEADLINE_S
        )
        pids.append(int(event["pid"]))
    begun = [cpu_s(pid) for pid in pids]
    # CPU time from the fork until the server is ready; wall time would include the
    # machine's other work.
    assert max(begun) < allow_s(0.8)
    workers = ("worker:0", "worker:1")
    running.wait_for_text("all is pushed", *workers, timeout_s=DEADLINE_S)
    before = [cpu_s(pid) for pid in pids]
    # Measure how much CPU time an idle server uses.
    threading.Event().wait(IDLE_S)
    idle = [cpu_s(pid) - was for pid, was in zip(pids, before, strict=True)]
    assert max(idle) < 0.1 * IDLE_S
    (cluster.folder / "go").touch()
    assert running.end(timeout_s=DEADLINE_S) == 0
    for task in running.report()["tasks"][2:]:
        assert task["state"] == "stopped"
        assert task["serving"]["applied"] == 50
        assert task["serving"]["dropped"] == 0
        assert task["serving"]["bytes"] == 200_000
    assert "50 updates, 200.0 kB" in cluster.command("status").stdout
    assert_nothing_left(running)
