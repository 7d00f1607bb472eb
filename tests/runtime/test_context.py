"""A process finds its rank: TF_CONFIG, tfcluster's variables, MPI, Slurm or none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tfcluster.plan.model import Runtime, Strategy
from tfcluster.runtime.context import Context, context_from
from tfcluster.runtime.errors import ContextError, NoRankError
from tfcluster.runtime.process_identity import (
    RankInfo,
    rank_info_among,
    rank_info_from,
    tasks_per_node,
)

CLUSTER = {
    "ps": ["h0:1"],
    "worker": ["h1:2", "h2:3", "h1:4"],
    "chief": ["h1:5"],
}


def tf_config(kind: str, index: Any = 0, cluster: Any = CLUSTER) -> dict[str, str]:
    config = {"cluster": cluster, "task": {"type": kind, "index": index}}
    return {"TF_CONFIG": json.dumps(config)}


def test_nothing_set_means_alone() -> None:
    context = context_from({})
    assert (context.rank, context.size, context.is_chief) == (0, 1, True)
    assert context.addresses == ()
    assert context.strategy is Strategy.NONE
    assert not context.trains


def test_an_empty_tf_config_means_alone() -> None:
    assert context_from({"TF_CONFIG": "{}"}).size == 1
    assert context_from({"TF_CONFIG": ""}).size == 1


@pytest.mark.parametrize(
    ("kind", "index", "identity"),
    [
        ("chief", 0, (0, 4, 0, 3, 0, 2)),
        ("master", 0, (0, 4, 0, 3, 0, 2)),
        ("worker", 0, (1, 4, 1, 3, 0, 1)),
        ("worker", 1, (2, 4, 0, 1, 1, 2)),
        ("worker", 2, (3, 4, 2, 3, 0, 1)),
    ],
)
def test_ranks_count_the_chief_first_then_workers(
    kind: str, index: int, identity: tuple[int, ...]
) -> None:
    context = context_from(tf_config(kind, index))
    assert identity == (
        context.rank,
        context.size,
        context.local_rank,
        context.local_size,
        context.cross_rank,
        context.cross_size,
    )
    assert context.addresses == ("h1:5", "h1:2", "h2:3", "h1:4")
    assert context.is_chief == (context.rank == 0)


def test_without_a_chief_worker_0_is_rank_0() -> None:
    env = tf_config("worker", 0, {"worker": ["[::1]:1", "[::1]:2"]})
    context = context_from(env)
    assert (context.rank, context.size, context.local_size) == (0, 2, 2)


def test_the_old_name_master_is_the_chief() -> None:
    cluster = {"master": ["a:1"], "worker": ["b:1"]}
    context = context_from(tf_config("master", 0, cluster))
    assert (context.task, context.rank) == ("chief:0", 0)
    assert context_from(tf_config("worker", 0, cluster)).rank == 1


def test_what_the_launcher_says_is_taken_over() -> None:
    env = tf_config("worker", 1) | {
        "TFCLUSTER_RUN": "digits-1",
        "TFCLUSTER_TASK": "worker:1",
        "TFCLUSTER_RANK": "2",
        "TFCLUSTER_SIZE": "4",
        "TFCLUSTER_LOCAL_RANK": "1",
        "TFCLUSTER_LOCAL_SIZE": "2",
        "TFCLUSTER_ATTEMPT": "3",
        "TFCLUSTER_TOKEN": "0aff",
        "TFCLUSTER_STRATEGY": "local_sgd",
        "TFCLUSTER_RUNTIME": '{"sync_every": 7, "strategy": "none", "newer": 1}',
        "TFCLUSTER_CROSS_RANK": "2",
        "TFCLUSTER_CROSS_SIZE": "3",
        "TFCLUSTER_DATA_SERVICE": "grpc://h0:9",
        "TFCLUSTER_DEVICE_FILTERS": '["/job:ps"]',
    }
    context = context_from(env)
    assert context == Context(
        task_type="worker",
        task_index=1,
        rank_info=RankInfo(
            rank=2, size=4, local_rank=1, local_size=2, cross_rank=2, cross_size=3
        ),
        addresses=("h1:5", "h1:2", "h2:3", "h1:4"),
        cluster={kind: tuple(found) for kind, found in CLUSTER.items()},
        run="digits-1",
        attempt=3,
        token=b"\x0a\xff",
        strategy=Strategy.LOCAL_SGD,
        options=Runtime(strategy=Strategy.LOCAL_SGD, sync_every=7),
        data_service="grpc://h0:9",
        device_filters=("/job:ps",),
    )
    assert context.trains
    assert "0aff" not in repr(context)
    assert str(context.token) not in repr(context)


def test_an_evaluator_is_alone_beside_the_cluster() -> None:
    env = tf_config("evaluator") | {"TFCLUSTER_STRATEGY": "collective"}
    context = context_from(env)
    assert (context.rank, context.size, context.addresses) == (0, 1, ())
    assert not context.trains


@pytest.mark.parametrize("env", [tf_config("ps"), {"TFCLUSTER_TASK": "data:0"}])
def test_servers_have_no_rank(env: dict[str, str]) -> None:
    context = context_from(env | {"TFCLUSTER_STRATEGY": "collective"})
    assert not context.trains
    with pytest.raises(NoRankError, match="has no rank"):
        _ = context.rank
    with pytest.raises(NoRankError):
        _ = context.local_size


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"TF_CONFIG": "{"}, "not JSON"),
        ({"TF_CONFIG": "[]"}, "not a JSON object"),
        (tf_config("worker", cluster=[]), "'cluster' is not an object"),
        (tf_config("worker", cluster={"worker": "a:1"}), "not a list of addresses"),
        (tf_config("worker", cluster={"worker": [1]}), "not a list of addresses"),
        (tf_config("worker", "0"), "index '0' is not"),
        (tf_config("worker", True), "index True is not"),
        (tf_config("worker", -1), "index -1 is not"),
        (tf_config("worker", 3), "there is no worker:3, the cluster has 3"),
        (tf_config("sampler", 0), "there is no sampler:0"),
        (tf_config("chief", cluster={"chief": ["a:1", "b:1"]}), "only one chief"),
        (
            tf_config("chief", cluster={"chief": ["a:1"], "master": ["b:1"]}),
            "the same job",
        ),
        (
            tf_config("chief", cluster={"chief": ["a:1"], "evaluator": ["b:1"]}),
            "'evaluator' tasks do not belong",
        ),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "has no 'type'"),
        (tf_config("worker") | {"TFCLUSTER_TASK": "worker:1"}, "TF_CONFIG's task is"),
        ({"TFCLUSTER_TASK": "worker"}, "not TYPE:INDEX"),
        (tf_config("worker") | {"TFCLUSTER_SIZE": "3"}, "TF_CONFIG has 4"),
        (tf_config("worker") | {"TFCLUSTER_RANK": "4"}, "TFCLUSTER_RANK='4'"),
        ({"TFCLUSTER_ATTEMPT": "x"}, "TFCLUSTER_ATTEMPT='x'"),
        ({"TFCLUSTER_STRATEGY": "magic"}, "not one of collective, "),
        ({"TFCLUSTER_TOKEN": "secret"}, "^TFCLUSTER_TOKEN is not hexadecimal$"),
        ({"TFCLUSTER_RUNTIME": "1"}, "not a JSON object"),
        ({"TFCLUSTER_DEVICE_FILTERS": "[1]"}, "not a list of device filters"),
    ],
)
def test_contradictions_have_a_message(env: dict[str, str], message: str) -> None:
    with pytest.raises(ContextError, match=message):
        context_from(env)


@pytest.mark.parametrize(
    ("env", "identity"),
    [
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "5",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                # mpirun inside a Slurm job: the step is that of mpirun's daemon.
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "3",
            },
            (3, 5, 1, 2, 1, 3),
        ),
        (
            {
                "PMI_RANK": "1",
                "PMI_SIZE": "2",
                "MPI_LOCALRANKID": "1",
                "MPI_LOCALNRANKS": "2",
            },
            (1, 2, 1, 2, 0, 1),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, 0, 1, 1, 2)),
        (
            {
                "SLURM_PROCID": "4",
                "SLURM_STEP_NUM_TASKS": "5",
                "SLURM_STEP_TASKS_PER_NODE": "1,2(x2)",
                "SLURM_NODEID": "2",
                "SLURM_LOCALID": "1",
            },
            (4, 5, 1, 2, 1, 2),
        ),
        # A batch script is not in a step, so it has no rank.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1, 0, 1, 0, 1)),
        # Grid Engine: slots are not ranks, and array tasks are independent.
        ({"NSLOTS": "8", "SGE_TASK_ID": "3"}, (0, 1, 0, 1, 0, 1)),
    ],
)
def test_what_schedulers_and_mpi_say(
    env: dict[str, str], identity: tuple[int, ...]
) -> None:
    rank, size, local_rank, local_size, cross_rank, cross_size = identity
    expected = RankInfo(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        cross_rank=cross_rank,
        cross_size=cross_size,
    )
    assert rank_info_from(env) == expected
    assert context_from(env).rank_info == expected


def test_tf_config_overrules_the_scheduler() -> None:
    env = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "5"} | tf_config("chief")
    assert (context_from(env).rank, context_from(env).size) == (0, 4)


def test_numbers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ContextError, match="'5' is not an integer, 0 to 4"):
        rank_info_from({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "5"})
    with pytest.raises(ContextError, match="'0' is not an integer, 1 or more"):
        rank_info_from({"PMI_RANK": "0", "PMI_SIZE": "0"})


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1, 2(x1)", [1, 2])],
)
def test_counts_of_slurm(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "2(x3", "a", "1,,2", "-1"])
def test_what_is_no_list_of_counts(text: str) -> None:
    with pytest.raises(ContextError, match="not a list of counts"):
        tasks_per_node(text)


def test_rank_infos_are_unique_and_complete() -> None:
    hosts = ["a", "b", "a", "c", "b", "a"]
    infos = [rank_info_among(hosts, rank) for rank in range(len(hosts))]
    assert len({(info.local_rank, info.cross_rank) for info in infos}) == len(hosts)
    assert [info.local_rank for info in infos] == [0, 0, 1, 0, 1, 2]
    assert [info.cross_rank for info in infos] == [0, 1, 0, 2, 1, 0]
    assert [info.cross_size for info in infos] == [3, 3, 2, 3, 2, 1]
