"""Ranks and their hosts, and how many bytes a rank sends, without TensorFlow."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.kit.ranks import ROOT, as_threads, results
from tfcluster.runtime.collective import Group, ReduceOp, Signature
from tfcluster.runtime.collective.transports.block_streams import blocks_of
from tfcluster.runtime.collective.transports.hierarchical import HostTransport
from tfcluster.runtime.context import context_from
from tfcluster.runtime.tf_server import filters_of

_WHO = """
import json
import sys
import tfcluster.runtime as tfc
print(json.dumps([
    tfc.rank(), tfc.size(), tfc.local_rank(), tfc.local_size(), tfc.cross_rank(),
    tfc.cross_size(), tfc.is_chief(), "tensorflow" in sys.modules,
]))
"""


def who(**env: str) -> list[object]:
    """The ranks and sizes that a program finds in this environment."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TF_", "SLURM_"))}
    done = subprocess.run(
        [sys.executable, "-c", _WHO],
        env={**clean, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    found: list[object] = json.loads(done.stdout)
    return found


TWO_HOSTS = [
    # rank, local rank, cross rank
    (0, 0, 0),
    (1, 1, 0),
    (2, 0, 1),
    (3, 1, 1),
]


@pytest.mark.parametrize(("rank", "local_rank", "cross_rank"), TWO_HOSTS)
def test_two_hosts_of_two_slots_each(
    rank: int, local_rank: int, cross_rank: int
) -> None:
    hosts = ["one:1001", "one:1002", "two:1001", "two:1002"]
    kind, index = ("chief", 0) if rank == 0 else ("worker", rank - 1)
    config = {
        "cluster": {"chief": hosts[:1], "worker": hosts[1:]},
        "task": {"type": kind, "index": index},
    }
    expected = [rank, 4, local_rank, 2, cross_rank, 2, rank == 0, False]
    assert who(TF_CONFIG=json.dumps(config)) == expected


@pytest.mark.parametrize(("rank", "local_rank", "cross_rank"), TWO_HOSTS)
def test_the_same_by_mpi_and_slurm(rank: int, local_rank: int, cross_rank: int) -> None:
    expected = [rank, 4, local_rank, 2, cross_rank, 2, rank == 0, False]
    by_mpi = {
        "OMPI_COMM_WORLD_RANK": rank,
        "OMPI_COMM_WORLD_SIZE": 4,
        "OMPI_COMM_WORLD_LOCAL_RANK": local_rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
    }
    assert who(**{name: str(value) for name, value in by_mpi.items()}) == expected
    by_slurm = {
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": local_rank,
        "SLURM_NODEID": cross_rank,
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    }
    assert who(**{name: str(value) for name, value in by_slurm.items()}) == expected


def test_sessions_beside_parameter_servers_see_these_and_their_task() -> None:
    cluster = {"chief": ["a:1"], "worker": ["b:1", "b:2"], "ps": ["c:1"]}

    def filters(kind: str, index: int, **env: str) -> tuple[str, ...]:
        config = {"cluster": cluster, "task": {"type": kind, "index": index}}
        return filters_of(context_from({"TF_CONFIG": json.dumps(config), **env}))

    assert filters("worker", 1) == ("/job:ps", "/job:worker/task:1")
    assert filters("chief", 0) == ("/job:ps", "/job:chief/task:0")
    assert filters("ps", 0) == ()
    said = {"TFCLUSTER_RUN": "r", "TFCLUSTER_DEVICE_FILTERS": '["/job:x"]'}
    assert filters("worker", 1, **said) == ("/job:x",)
    del cluster["ps"]
    assert filters("worker", 1) == ()


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_a_ring_sends_what_it_has_to(size: int) -> None:
    numbers = np.arange(240_000, dtype=np.float32)

    def sent(group: Group) -> int:
        vector = numbers.copy()
        with group.exchange(Signature("a large vector")) as call:
            before = _sent_bytes(call.transport)
            call.transport.allreduce(vector, ReduceOp.SUM)
            after = _sent_bytes(call.transport)
        np.testing.assert_array_equal(vector, numbers * size)
        return after - before

    # With host_key "" no memory is shared, so everything goes through connections.
    blocks = len(list(blocks_of(0, len(numbers) // size)))
    each = numbers.nbytes // size + 4 * blocks
    for found in results(as_threads(size, sent, [""] * size)):
        assert found == 2 * (size - 1) * each


def _sent_bytes(transport: HostTransport) -> int:
    assert isinstance(transport, HostTransport)
    return transport.sent_bytes
