"""The built-in TensorFlow servers under TensorFlow's own strategies, on held ports."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.kit.time_limits import allow_s
from tests.kit.waiting import eventually
from tests.runtime.harness import Running, WarmInterpreter, held_ports, start_cold
from tfcluster.runtime.context import Context
from tfcluster.runtime.errors import ContextError
from tfcluster.runtime.parameter_server.server_socket import request_server
from tfcluster.runtime.tf1.ps_reachability import Reachability, probe
from tfcluster.runtime.tf_server import device_filters, start

PROGRAMS = Path(__file__).parent / "programs"

Cluster = dict[str, list[str]]


def test_device_filters() -> None:
    with_ps = {"ps": ["a:1"], "worker": ["b:1", "c:1"], "chief": ["d:1"]}
    assert device_filters("ps", 0, with_ps) == ()
    assert device_filters("worker", 1, with_ps) == (
        "/job:ps",
        "/job:worker/task:1",
    )
    assert device_filters("chief", 0, with_ps) == ("/job:ps", "/job:chief/task:0")
    assert device_filters("worker", 0, {"worker": ["a:1", "b:1"]}) == ()
    assert device_filters("worker", 0, {"worker": ["a:1"], "ps": []}) == ()


def test_a_task_without_an_address_is_no_server() -> None:
    with pytest.raises(ContextError, match="no address for ps:1"):
        start(Context(task_type="ps", task_index=1, cluster={"ps": ("a:1",)}))


@contextmanager
def cluster_of(**counts: int) -> Iterator[Cluster]:
    """Addresses for ``counts`` tasks of each type, with their ports held."""
    with held_ports(sum(counts.values())) as ports:
        free = iter(ports)
        yield {
            kind: [f"127.0.0.1:{next(free)}" for _ in range(count)]
            for kind, count in counts.items()
        }


def task_env(cluster: Cluster, kind: str, index: int = 0) -> dict[str, str]:
    config = {"cluster": cluster, "task": {"type": kind, "index": index}}
    return {
        "TF_CONFIG": json.dumps(config),
        "TF_GRPC_REUSE_PORT": "true",
        "TFCLUSTER_TASK": f"{kind}:{index}",
        "TFCLUSTER_STRATEGY": "none",
        "CUDA_VISIBLE_DEVICES": "",
    }


def servers(
    warm: WarmInterpreter, cwd: Path, cluster: Cluster, *kinds: str
) -> list[Running]:
    return [
        warm.start(["server"], cwd, task_env(cluster, kind, index))
        for kind in kinds
        for index in range(len(cluster[kind]))
    ]


def stop(task: Running) -> float:
    """Send SIGTERM; the seconds until the task has ended."""
    begin = time.monotonic()
    os.kill(task.pid, signal.SIGTERM)
    ended = task.end()
    assert ended.status == 0, ended.output
    return time.monotonic() - begin


@pytest.mark.tensorflow
def test_a_coordinator_drives_built_in_servers(
    warm: WarmInterpreter, tmp_path: Path
) -> None:
    with cluster_of(chief=1, worker=2, ps=1) as cluster:
        others = servers(warm, tmp_path, cluster, "worker", "ps")
        chief = warm.start(
            ["run", str(PROGRAMS / "coordinator.py")],
            tmp_path,
            task_env(cluster, "chief"),
        ).end()
        assert chief.status == 0, chief.output
        line = chief.output.splitlines()[-1]
        assert line.startswith("total 40 of 40 on /job:ps/"), chief.output
        for task in others:
            assert stop(task) < allow_s(1)


@pytest.mark.tensorflow
def test_mirrored_workers_train_in_step(warm: WarmInterpreter, tmp_path: Path) -> None:
    with cluster_of(worker=2) as cluster:
        tasks = [
            warm.start(
                ["run", str(PROGRAMS / "mirrored.py")],
                tmp_path,
                task_env(cluster, "worker", index),
            )
            for index in range(2)
        ]
        ended = [task.end() for task in tasks]
    lines = [task.output.splitlines()[-1] for task in ended]
    # From 1 towards the mean of both targets: 0.5 + 0.5 * 0.8 ** 20.
    assert lines == ["rank 0 of 2: 0.5058", "rank 1 of 2: 0.5058"]
    assert [task.status for task in ended] == [0, 0]


@pytest.mark.tensorflow
def test_sessions_of_old_use_a_ps(warm: WarmInterpreter, tmp_path: Path) -> None:
    # worker:1 is missing, which must not delay the others.
    with cluster_of(worker=2, ps=1) as cluster:
        (ps,) = servers(warm, tmp_path, cluster, "ps")
        worker = warm.start(
            ["run", str(PROGRAMS / "session.py")],
            tmp_path,
            task_env(cluster, "worker"),
        ).end()
        assert worker.output.splitlines()[-1].startswith("counted [1, 2, 3] /job:ps")
        assert stop(ps) < allow_s(1)


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 5.0).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.tensorflow
def test_the_server_of_a_ps_starts_when_a_task_of_the_run_asks(
    warm: WarmInterpreter, tmp_path: Path
) -> None:
    token = bytes(range(32))
    with cluster_of(worker=2, ps=1) as cluster, held_ports(1) as (port,):
        service = (f"127.0.0.1:{port}",)
        env = {
            **task_env(cluster, "ps"),
            "TFCLUSTER_STRATEGY": "parameter_server",
            "TFCLUSTER_PARAMETER_SERVERS": service[0],
            "TFCLUSTER_TOKEN": token.hex(),
        }
        ps = warm.start(["server"], tmp_path, env)
        ps.wait_for_event("phase", phase="serving")
        (tensorflow,) = cluster["ps"]
        assert listens(service[0])
        assert not listens(tensorflow)
        ask = partial(request_server, service, 0, size=2)
        assert not ask(rank=0, token=token[::-1])
        assert not listens(tensorflow)
        assert ask(rank=1, token=token)
        assert probe(tensorflow) is Reachability.READY
        assert ask(rank=0, token=token)  # It asks for the same server.
        os.kill(ps.pid, signal.SIGTERM)
        ended = ps.end()
        assert ended.status == 0, ended.output
        (warning,) = ended.said("warning")
        assert f"now listens on {tensorflow}" in warning["text"]


@pytest.mark.tensorflow
def test_data_tasks_serve_data(warm: WarmInterpreter, tmp_path: Path) -> None:
    with cluster_of(data=1) as cluster:
        env = {
            "TF_GRPC_REUSE_PORT": "true",
            "TFCLUSTER_DATA_SERVICE": f"grpc://{cluster['data'][0]}",
        }
        producers = []
        for index in range(2):
            named = {**env, "TFCLUSTER_TASK": f"data:{index}"}
            producers.append(warm.start(["server"], tmp_path, named))
            producers[-1].wait_for_event("phase", phase="serving")
        consumer = warm.start(
            ["run", str(PROGRAMS / "data_consumer.py")], tmp_path, env
        ).end()
        assert (
            consumer.output.splitlines()[-1] == f"sum {sum(x * x for x in range(20))}"
        )
        for task in producers:
            assert stop(task) < allow_s(1)


@pytest.mark.tensorflow
@pytest.mark.parametrize("kind", ["ps", "data"])
def test_a_server_without_an_address_says_so(
    kind: str, warm: WarmInterpreter, tmp_path: Path
) -> None:
    ended = warm.start(["server"], tmp_path, {"TFCLUSTER_TASK": f"{kind}:0"}).end()
    assert ended.status == 1
    (failure,) = ended.said("failure")
    assert ended.output == f"{failure['cause']}\n"
    assert ended.output.startswith("tfcluster: TF")


@pytest.mark.tensorflow
def test_a_server_listens_idles_and_stops(
    warm: WarmInterpreter, tmp_path: Path
) -> None:
    with cluster_of(ps=1) as cluster:
        (server,) = servers(warm, tmp_path, cluster, "ps")
        server.wait_for_event("phase", phase="serving")
        host, port = cluster["ps"][0].split(":")
        socket.create_connection((host, int(port)), 5).close()
        process = psutil.Process(server.pid)
        server.ask("stacks")
        assert "_until_stopped" in server.wait_for_event("stack")["text"]
        # Once all threads have started, none is busy: less than a tenth of one CPU.
        eventually(lambda: process.cpu_percent(interval=0.5) < 10, lambda: "busy", 30.0)
        assert stop(server) < allow_s(1)


def test_no_thread_starts_before_the_signals_are_blocked() -> None:
    # numpy's own threads would get the signals.
    code = (
        "import sys, tfcluster.runtime.task.serve; "
        "print({'tensorflow', 'keras', 'numpy'} & {*sys.modules})"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout == "set()\n"


@pytest.mark.slow
@pytest.mark.tensorflow
def test_a_cold_server_stops_even_while_it_starts(tmp_path: Path) -> None:
    with cluster_of(ps=1) as cluster:
        server = start_cold(["server"], tmp_path, task_env(cluster, "ps"))
        server.wait_for_event("phase", phase="importing tensorflow")
        os.kill(server.pid, signal.SIGTERM)
        assert server.end().status == 0
