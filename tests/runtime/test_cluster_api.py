"""The API that describes a cluster and trains on it without a strategy.

TensorFlow 1 programs have separate tests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.ranks import Job, run_jobs
from tests.plan.descriptions import describe, hosts
from tfcluster.config import load
from tfcluster.plan.compose import cluster_of, compose
from tfcluster.plan.placement import place
from tfcluster.runtime.errors import ContextError
from tfcluster.runtime.tf1.cluster_formats import jobs_of
from tfcluster.schedulers.sge import SCHEDULER

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

CLUSTER = {
    "chief": ["h0:1"],
    "worker": ["h1:2", "h2:3"],
    "ps": ["h0:4", "h3:5"],
}
CONFIGS: list[dict[str, Any]] = [
    {"cluster": cluster, "task": {"type": kind, "index": index}}
    for cluster, tasks in [
        (CLUSTER, [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 1)]),
        ({"worker": ["h1:2", "h2:3"]}, [("worker", 0), ("worker", 1)]),
        ({"master": ["h0:1"], "worker": ["h1:2"]}, [("master", 0), ("worker", 0)]),
        (CLUSTER, [("evaluator", 0)]),
    ]
    for kind, index in tasks
]


@dataclass(frozen=True)
class Found:
    folder: Path

    def of(self, job: str, case: str, size: int = 2) -> list[Any]:
        """The results of a case, by rank."""
        texts = [(self.folder / f"{job}-{r}.json").read_text() for r in range(size)]
        return [json.loads(text)[case] for text in texts]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("d-items")

    def job(name: str, size: int, *cases: str, **env: str) -> Job:
        script = "own_allreduce.py" if name == "pieces" else "cluster_api.py"
        return Job(name, size, script, (str(folder / name), *cases), env)

    def fit(name: str, strategy: str, **options: Any) -> Job:
        runtime = json.dumps(options)
        return job(
            name, 2, "fit", TFCLUSTER_STRATEGY=strategy, TFCLUSTER_RUNTIME=runtime
        )

    alone: Mapping[str, str] = {
        "CLUSTER": json.dumps(CLUSTER),
        "CONFIGS": json.dumps(CONFIGS),
    }
    jobs = [
        job("alone", 1, "forms", "resolver", "service", **alone),
        fit("collective", "collective"),
        fit("local", "local_sgd", sync_every=1),
        fit("offset", "collective", data="seed_offset"),
        job("pieces", 2, "pieces", TFCLUSTER_STRATEGY="none"),
    ]
    ended = run_jobs(folder, jobs, timeout_s=280)
    for ranks in ended.values():
        assert set(ranks.exit_codes) == {0}, ranks.outputs
    return Found(folder)


@pytest.mark.slow
def test_a_cluster_has_three_forms(found: Found) -> None:
    (forms,) = found.of("alone", "forms", size=1)
    assert set(forms) == {"ClusterSpec", "ClusterDef", "dict", "ServerDef"}
    for jobs, again, equal in forms.values():
        # JSON has turned the indices into strings.
        assert {job: list(found.values()) for job, found in jobs.items()} == CLUSTER
        assert again == CLUSTER
        assert equal


def test_a_dict_may_leave_tasks_out_and_use_old_names() -> None:
    sparse = {"ps": "h0:1", "worker": {3: "h1:2"}, "master": ("h2:3",)}
    assert jobs_of(sparse) == {
        "ps": {0: "h0:1"},
        "worker": {3: "h1:2"},
        "chief": {0: "h2:3"},
    }
    for wrong in (None, "h0:1", {"ps": 7}, {"worker": [1]}):
        with pytest.raises(ContextError):
            jobs_of(wrong)


def test_from_yaml_and_back(tmp_path: Path) -> None:
    tasks = {"chief": 1, "worker": 3, "ps": 2}
    config = tmp_path / "cluster.yaml"
    config.write_text(json.dumps({"command": "true", "tasks": tasks}))
    config.chmod(0o644)
    description = load(config, environ={}).description
    specs = compose(description, place(description, hosts(6)), lambda program: False)
    ports = {spec.task: 4000 + number for number, spec in enumerate(specs)}
    jobs = jobs_of(dict(cluster_of(specs, ports).jobs))
    assert {job: len(found) for job, found in jobs.items()} == tasks


@pytest.mark.slow
def test_tf_config_reads_as_in_tensorflow(found: Found) -> None:
    (rows,) = found.of("alone", "resolver", size=1)
    assert len(rows) == len(CONFIGS)
    for theirs, ours in rows:
        # TensorFlow does not rename the master to chief.
        theirs = json.loads(json.dumps(theirs).replace('"master"', '"chief"'))
        assert ours == theirs


@pytest.mark.slow
def test_only_the_chief_writes_files(found: Found) -> None:
    chief, worker = (rank["files"] for rank in found.of("collective", "fit"))
    # Files that the chief has saved also appear under the worker's own names.
    assert set(worker) <= {"best.keras", "log.csv", "end.weights.h5"}
    written = {"best.keras", "log.csv", "end.weights.h5"}
    assert written <= set(chief)
    assert any(name.startswith("backup/") for name in chief)


def test_slots_of_a_parallel_environment_become_hosts(tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("node10 2 all.q@node10 UNDEFINED\nnode9 1 all.q@node9\n")
    env = {
        "JOB_ID": "12",
        "SGE_TASK_ID": "undefined",
        "PE_HOSTFILE": str(hostfile),
        "PATH": str(tmp_path),
    }
    allocation = SCHEDULER.allocate(describe({"worker": 3}), env)
    assert [(host.name, host.slots) for host in allocation.hosts] == [
        ("node10", 2),
        ("node9", 1),
    ]


@pytest.mark.slow
def test_one_data_service_job_serves_all_ranks(found: Found) -> None:
    (parts,) = found.of("alone", "service", size=1)
    in_turn = [number for part in parts["in turn"] for number in part]
    assert sorted(in_turn) == list(range(60))
    first, *others = parts["in step"]
    assert sorted(first) == list(range(60))
    assert all(other == first for other in others)


@pytest.mark.slow
def test_averaged_every_step_equals_the_mean_of_gradients(found: Found) -> None:
    # test_local_sgd.py tests intervals, bytes, and weights between averagings.
    local, collective = (found.of(job, "fit") for job in ("local", "collective"))
    assert local[0]["weights"] == local[1]["weights"]
    for ours, theirs in zip(local[0]["weights"], collective[0]["weights"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.slow
def test_ranks_shuffle_by_seeds_of_their_own(found: Found) -> None:
    # A step sees the whole batch, on every rank.
    shared, other = [rank["seen"] for rank in found.of("collective", "fit")]
    assert shared == other
    for epoch in (slice(0, 3), slice(3, 6)):
        rows = [row for batch in shared[epoch] for row in batch]
        assert sorted(rows) == list(range(24))
    ranks = found.of("offset", "fit")
    assert ranks[0]["seen"] == ranks[1]["seen"]
    for epoch in (slice(0, 3), slice(3, 6)):
        batches = ranks[0]["seen"][epoch]
        orders = [
            [row for batch in batches for row in batch[start : start + 8]]
            for start in (0, 8)
        ]
        # Each rank has all of the rows, in a different order.
        assert all(sorted(order) == list(range(24)) for order in orders)
        assert orders[0] != orders[1]
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert ranks[0]["split"] == ranks[1]["split"]


@pytest.mark.slow
def test_the_api_works_without_a_strategy(found: Found) -> None:
    ranks = found.of("pieces", "pieces")
    assert not any(rank["strategy"] for rank in ranks)
    assert [rank["begun"] for rank in ranks] == [[1.0] * 3] * 2
    weight = 1.0
    for even in range(0, 12, 2):
        weight -= 0.1 * (weight - (even + 0.5))
    for rank in ranks:
        np.testing.assert_allclose(rank["in_step"], [weight] * 3)
    assert ranks[0]["apart"] != ranks[1]["apart"]
    last = [rank["apart"][-1] for rank in ranks]
    for number, weights in ranks[0]["everybody"]:
        assert number in (0, 1)
        np.testing.assert_allclose(weights, np.mean(last, axis=0))
