"""TensorFlow 1 scripts that know nothing of the cluster they run in."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.harness import Ended, Running, WarmInterpreter, held_ports, told
from tfcluster.runtime.scripts.analysis import analyse

PROGRAMS = Path(__file__).parent / "programs" / "v1"
DEADLINE_S = 120.0

pytestmark = pytest.mark.timeout(180)


class Tasks:
    """A cluster whose tasks are started one by one, in a common folder."""

    def __init__(
        self,
        warm: WarmInterpreter,
        folder: Path,
        jobs: dict[str, list[str]],
    ) -> None:
        self.warm, self.folder, self.jobs = warm, folder, jobs
        self.ps: list[Running] = []

    def server(self, kind: str = "ps", index: int = 0) -> Running:
        env = self._env(kind, index, {})
        running = self.warm.start(["server"], self.folder, env)
        self.ps.append(running)
        return running

    def script(
        self,
        name: str,
        kind: str = "worker",
        index: int = 0,
        attempt: int = 0,
        **options: Any,
    ) -> Running:
        return self.run(
            [str(PROGRAMS / "script.py"), name], kind, index, attempt, options
        )

    def run(
        self,
        words: list[str],
        kind: str = "worker",
        index: int = 0,
        attempt: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> Running:
        env = self._env(kind, index, dict(options or {}))
        return self.warm.start(
            ["run", *words], self.folder, env | {"TFCLUSTER_ATTEMPT": str(attempt)}
        )

    def _env(self, kind: str, index: int, options: dict[str, Any]) -> dict[str, str]:
        task = {"type": kind, "index": index}
        return {
            "TF_CONFIG": json.dumps({"cluster": self.jobs, "task": task}),
            "TF_GRPC_REUSE_PORT": "true",
            "TFCLUSTER_TASK": f"{kind}:{index}",
            "TFCLUSTER_STRATEGY": "parameter_server",
            "TFCLUSTER_RUNTIME": json.dumps(options),
            "TFCLUSTER_TOKEN": "00" * 32,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONUNBUFFERED": "1",
        }

    def end(self) -> None:
        for running in self.ps:
            os.kill(running.pid, signal.SIGKILL)
            running.end()


@pytest.fixture
def cluster(warm: WarmInterpreter, tmp_path: Path) -> Iterator[Tasks]:
    """A running ps, and two workers that are not started yet."""
    with tasks_of(warm, tmp_path, ps=1, worker=2) as tasks:
        tasks.server()
        yield tasks


@contextmanager
def tasks_of(warm: WarmInterpreter, folder: Path, **counts: int) -> Iterator[Tasks]:
    with held_ports(sum(counts.values())) as ports:
        free = iter(ports)
        jobs = {
            kind: [f"127.0.0.1:{next(free)}" for _ in range(count)]
            for kind, count in counts.items()
        }
        tasks = Tasks(warm, folder, jobs)
        try:
            yield tasks
        finally:
            tasks.end()


def said(ended: Ended, name: str) -> dict[str, Any]:
    """All values that the script has printed under ``name``."""
    found: dict[str, Any] = {}
    for item in told(ended.output, name):
        found |= item
    assert found, ended.output
    return found


def done(ended: Ended, name: str) -> dict[str, Any]:
    assert ended.status == 0, ended.output
    return said(ended, name)


# --- what a script sees -------------------------------------------------------------


@pytest.mark.tensorflow
def test_workers_train_between_graphs(cluster: Tasks) -> None:
    workers = [cluster.script("monitored", index=index) for index in range(2)]
    ended = [worker.end(DEADLINE_S) for worker in workers]
    for index, each in enumerate(ended):
        found = done(each, "monitored")
        assert found["w"] == "/job:ps/task:0"
        assert found["step_on"] == "/job:ps/task:0"
        assert found["last"] >= 35
        assert each.said("step")[-1]["step"] > 0, index
    # Only the chief has written, although the others name folders of their own.
    assert (cluster.folder / "checkpoints0" / "checkpoint").exists()
    assert not (cluster.folder / "checkpoints1").exists()


@pytest.mark.tensorflow
def test_a_worker_trains_while_another_is_absent(cluster: Tasks) -> None:
    assert done(cluster.script("monitored").end(DEADLINE_S), "monitored")["last"] >= 39


@pytest.mark.tensorflow
def test_a_task_has_one_server(cluster: Tasks) -> None:
    found = done(cluster.script("servers").end(DEADLINE_S), "servers")
    assert found == {
        "same": 1,
        "local": True,
        "counted": [1, 2, 3],
        "filters": ["/job:ps", "/job:worker/task:0"],
        # The server that the script has created is unchanged.
        "own": [],
        "job": "worker",
    }


@pytest.mark.tensorflow
def test_what_the_script_says_counts(warm: WarmInterpreter, tmp_path: Path) -> None:
    with tasks_of(warm, tmp_path, ps=2, worker=1) as tasks:
        found = done(tasks.script("own_choices").end(DEADLINE_S), "own_choices")
    assert found == {
        "w": "/job:ps/task:1",
        "x": "/job:worker/task:7",
        # Variables are placed by bytes: the three small ones are less than the big one.
        "big": "/job:ps/task:0",
        "small": ["/job:ps/task:1"] * 3,
    }


@pytest.mark.tensorflow
def test_there_is_one_chief(warm: WarmInterpreter, tmp_path: Path) -> None:
    # Both have index 0, and consider themselves the chief.
    with tasks_of(warm, tmp_path, ps=1, chief=1, worker=1) as tasks:
        tasks.server()
        running = [tasks.script("says_chief", kind) for kind in ("worker", "chief")]
        worker, chief = (each.end(DEADLINE_S) for each in running)
    assert done(worker, "says_chief") == {"initialises": False}
    assert done(chief, "says_chief") == {"initialises": True}
    (warning,) = worker.said("warning")
    assert warning["text"].startswith("the script treats worker:0 as the chief, but ")
    assert not chief.said("warning")


@pytest.mark.tensorflow
def test_supervisors_of_old(cluster: Tasks) -> None:
    running = [cluster.script("supervised", index=index) for index in range(2)]
    steps = [done(each.end(DEADLINE_S), "supervised")["step"] for each in running]
    assert sorted(steps)[-1] == 2


@pytest.mark.tensorflow
def test_a_worker_that_only_serves_ends_with_the_chief(cluster: Tasks) -> None:
    other = cluster.script("joins", index=1)
    other.wait_for_output("serves", DEADLINE_S)
    found = done(cluster.script("joins").end(DEADLINE_S), "joins")
    assert found["w"] == [-3.0] * 3
    assert found["on"] == ["/job:worker/task:0", "/job:worker/task:1"]
    assert done(other.end(DEADLINE_S), "joins")["ended"]


@pytest.mark.tensorflow
def test_the_mean_of_workers_equals_one_machine(
    warm: WarmInterpreter, tmp_path: Path
) -> None:
    with tasks_of(warm, tmp_path, ps=2, chief=1, worker=1) as tasks:
        for index in range(2):
            tasks.server(index=index)
        running = [
            tasks.run([str(PROGRAMS / "built.py"), "25"], kind)
            for kind in ("chief", "worker")
        ]
        ended = [each.end(DEADLINE_S) for each in running]
    for each in ended:
        found = done(each, "built")
        assert found["end"] < 0.5 * found["begin"]
        assert found["apart"] < 1e-5


# --- no task waits for ever or trains alone -----------------------------------------


@pytest.mark.tensorflow
def test_a_late_chief_is_waited_for(cluster: Tasks) -> None:
    worker = cluster.script("waits", index=1, stall_warning_s=0.2)
    waiting = worker.wait_for_event("waiting")
    assert waiting["what"] == "waiting for worker:0, the chief, to initialise variables"
    chief = cluster.script("waits")
    worker.wait_for_output("begun", DEADLINE_S)
    (cluster.folder / "end").touch()
    assert done(chief.end(DEADLINE_S), "waits") == {"begun": 0}
    assert done(worker.end(DEADLINE_S), "waits")


@pytest.mark.tensorflow
def test_a_missing_chief_is_given_up(cluster: Tasks) -> None:
    ended = cluster.script("waits", index=1, stall_timeout_s=1.0).end(DEADLINE_S)
    assert ended.status == 1
    assert (
        "CollectiveTimeoutError: waiting for worker:0, the chief, to initialise "
        "variables: given up after 1 s"
    ) in ended.output


@pytest.mark.tensorflow
def test_a_missing_ps_is_given_up(warm: WarmInterpreter, tmp_path: Path) -> None:
    with tasks_of(warm, tmp_path, ps=1, worker=1) as tasks:
        ended = tasks.script("waits", stall_timeout_s=1.0).end(DEADLINE_S)
        address = tasks.jobs["ps"][0]
    assert ended.status == 1
    assert f"waiting for ps:0 ({address}) to listen: given up after 1 s" in ended.output


@pytest.mark.tensorflow
def test_a_dead_ps_is_named(cluster: Tasks) -> None:
    worker = cluster.script("waits")
    worker.wait_for_output("begun", DEADLINE_S)
    os.kill(cluster.ps[0].pid, signal.SIGKILL)
    ended = worker.end(DEADLINE_S)
    assert ended.status == 1
    address = cluster.jobs["ps"][0]
    assert f"PeerLostError: ps:0 ({address}) is gone" in ended.output
    (failure,) = ended.said("failure")
    assert "restart the job from its last checkpoint" in failure["cause"]


@pytest.mark.tensorflow
def test_a_wait_in_a_graph_is_given_up(cluster: Tasks) -> None:
    ended = cluster.script("stuck", stall_timeout_s=2.0).end(DEADLINE_S)
    assert ended.status == 1
    (failure,) = ended.said("failure")
    assert "worker:0 has waited 2 s in one session.run" in failure["cause"]


@pytest.mark.tensorflow
@pytest.mark.parametrize("index", [0, 1])
def test_who_is_started_again_goes_on_with_what_is_there(
    index: int, cluster: Tasks
) -> None:
    """This includes the chief, which must not reset weights that others train."""
    workers = [cluster.script("waits", index=each) for each in range(2)]
    for worker in workers:
        worker.wait_for_event("step")
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
        worker.end()
    again = cluster.script("waits", index=index, attempt=1)
    again.wait_for_output("begun", DEADLINE_S)
    (cluster.folder / "end").touch()
    assert done(again.end(DEADLINE_S), "waits")["begun"] > 0


@pytest.mark.tensorflow
def test_another_model_is_refused(cluster: Tasks) -> None:
    running = [cluster.script("other_model", index=index) for index in range(2)]
    chief, worker = (each.end(DEADLINE_S) for each in running)
    assert done(chief, "other_model")
    assert worker.status == 1
    assert (
        "CollectiveMismatchError: worker:1 has a different model from worker:0, the "
        "chief: different: w is float32 (4,) on /job:ps/task:0, on the chief float32 "
        "(3,) on /job:ps/task:0. All tasks must build the same graph"
    ) in worker.output


@pytest.mark.tensorflow
def test_a_graph_of_ones_own_is_refused(cluster: Tasks) -> None:
    ended = cluster.script("undistributed").end(DEADLINE_S)
    assert ended.status == 1
    assert "NotDistributedError: the script was not distributed" in ended.output
    assert "replica_device_setter()" in ended.output


# --- pure ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("with tf.device(tf.train.replica_device_setter()): pass", True),
        ("from x import MonitoredTrainingSession\nMonitoredTrainingSession()", True),
        ("# replica_device_setter", False),
        ("print('Supervisor')", False),
        ("import keras; model.fit(x)", False),
        ("replica_device_setter(", False),
    ],
)
def test_scripts_are_known_by_their_text(source: str, expected: bool) -> None:
    assert analyse(source).is_tf1_cluster_script is expected
