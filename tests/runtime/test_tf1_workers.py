"""The workers of a cluster, from TF_CONFIG or a server; where variables are placed."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.kit import PYTHONPATH

_PROGRAM = """
import json, os, socket, sys, threading
import tensorflow as tf
from tfcluster.runtime import v1
from tfcluster.runtime.errors import ContextError
from tfcluster.runtime.tf1.parameter_server import Caches
from tfcluster.runtime.tf1.cluster_members import cluster_of
from tfcluster.runtime.tf1.graph_builder import least, imbalance
from tfcluster.runtime.tf1 import ps_reachability

tf1 = tf.compat.v1
jobs = json.loads(os.environ["TF_CONFIG"])["cluster"]
found = {}

def told(workers):
    return [workers.task_index, workers.num_ps, workers.num_worker, workers.rank,
            workers.is_chief, workers.device, list(workers.tasks),
            list(workers.ps_devices)]

found["tf_config"] = told(v1.workers())
spec = tf1.train.ClusterSpec(jobs)
definition = tf1.train.ServerDef(
    cluster=spec.as_cluster_def(), job_name="worker", task_index=1)
found["server_def"] = told(v1.workers(definition))
old = {"master": jobs["chief"], "worker": jobs["worker"], "ps": jobs["ps"]}
definition = tf1.train.ServerDef(
    cluster=tf1.train.ClusterSpec(old).as_cluster_def(), job_name="master")
found["master"] = told(v1.workers(definition))
local = tf1.train.Server({"worker": ["localhost:0"]}, "worker", 0)
found["server"] = [v1.workers(local).num_worker, v1.workers(local).num_ps]
found["errors"] = []
for make in (lambda: v1.workers(local).ps_devices,
             lambda: v1.Workers(jobs, "ps", 0),
             lambda: v1.Workers(jobs, "worker", 2)):
    try:
        make()
    except ContextError as error:
        found["errors"].append(str(error))
forms = (spec, spec.as_cluster_def(), jobs)
found["forms"] = [cluster_of(form) == cluster_of(jobs) for form in forms]
found["round_trip"] = tf1.train.ClusterSpec(cluster_of(spec.as_cluster_def())) == spec
caches = Caches(["a", "b"], "cpu", 100)
sizes = [50, 300, 200, 150, 99]
found["caches"] = [caches.device_for(size) for size in sizes]
found["least"] = [least([3, 1], [0, 9]), least([1, 1], [2, 1]), least([0, 0], [0, 0])]
large = 3 << 20
found["imbalance"] = [imbalance("v", large, [large, 1 << 20]) is not None,
                      imbalance("v", large, [large, large]),
                      imbalance("v", 1000, [1000, 0])]
ps_reachability._PROBE_TIMEOUT_S = 0.5
listener = socket.create_server(("127.0.0.1", 0))
address = "127.0.0.1:%d" % listener.getsockname()[1]
found["answers"] = [ps_reachability.probe(local.target[len("grpc://"):]).name]
found["answers"].append(ps_reachability.probe(address).name)
closing = threading.Thread(target=lambda: [listener.accept()[0].close() for _ in "12"])
closing.start()
found["answers"].append(ps_reachability.probe(address).name)
listener.close()
closing.join()
found["answers"].append(ps_reachability.probe(address).name)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> Any:
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1", "e:1"]}
    task = {"type": "worker", "index": 1}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={
            "PYTHONPATH": PYTHONPATH,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


pytestmark = [pytest.mark.tensorflow, pytest.mark.slow, pytest.mark.timeout(150)]

SECOND = [
    1,
    2,
    3,
    2,
    False,
    "/job:worker/task:1",
    ["chief:0", "worker:0", "worker:1"],
    ["/job:ps/task:0/device:CPU:0", "/job:ps/task:1/device:CPU:0"],
]


def test_workers_out_of_tf_config_or_a_server(found: Any) -> None:
    assert found["tf_config"] == SECOND
    assert found["server_def"] == SECOND
    assert found["server"] == [1, 0]


def test_master_is_the_chief(found: Any) -> None:
    assert found["master"][3:6] == [0, True, "/job:chief/task:0"]


def test_a_missing_setting_is_named(found: Any) -> None:
    no_ps, is_ps, no_task = found["errors"]
    assert "no parameter server: give it one with tasks.ps" in no_ps
    assert "ps:0 does not train" in is_ps
    assert "no worker:2" in no_task


def test_a_cluster_in_three_forms(found: Any) -> None:
    assert found["forms"] == [True, True, True]
    assert found["round_trip"] is True


def test_small_variables_together_large_ones_spread(found: Any) -> None:
    assert found["caches"] == ["cpu", "a", "b", "b", "cpu"]


def test_the_fewest_bytes_come_first(found: Any) -> None:
    assert found["least"] == [1, 1, 0]
    assert found["imbalance"] == [True, None, None]


def test_only_a_server_that_speaks_is_there(found: Any) -> None:
    """The kernel still accepts connections for a process that it is terminating."""
    assert found["answers"] == ["READY", "SILENT", "CLOSED", "CLOSED"]
