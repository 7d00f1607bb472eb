"""Hosts and slots from a job's environment variables, in Slurm's formats."""

from __future__ import annotations

import pytest

from tfcluster.base.errors import ConfigError, StartError
from tfcluster.schedulers.slurm.variables import (
    SlurmNode,
    counts,
    is_inside,
    nodes,
    require_one_launcher,
)

JOB = {"SLURM_JOB_ID": "7"}


def slots_of(**variables: str) -> list[tuple[str, int | None]]:
    return [(node.name, node.slots) for node in nodes({**JOB, **variables})]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4", [4]),
        ("2(x3),1", [2, 2, 2, 1]),
        ("1,2(x2),1", [1, 2, 2, 1]),
        ("16(x2)", [16, 16]),
        ("0,3", [0, 3]),
    ],
)
def test_compressed_counts(text: str, expected: list[int]) -> None:
    assert counts(text) == expected


@pytest.mark.parametrize(
    "text", ["", "2(x)", "2x3", "(x3)", "2,", "a", "-1", "9(x9999999)"]
)
def test_counts_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="count"):
        counts(text)


def test_the_order_is_the_list_s_and_counts_follow_it() -> None:
    found = slots_of(
        SLURM_JOB_NODELIST="node[8-10],node2", SLURM_TASKS_PER_NODE="2(x3),1"
    )
    assert found == [("node8", 2), ("node9", 2), ("node10", 2), ("node2", 1)]


def test_padding_and_suffixes() -> None:
    names = [name for name, _ in slots_of(SLURM_JOB_NODELIST="gpu[08-10]-ib,login")]
    assert names == ["gpu08-ib", "gpu09-ib", "gpu10-ib", "login"]


def test_without_counts_the_slots_are_open() -> None:
    assert slots_of(SLURM_JOB_NODELIST="a,b") == [("a", None), ("b", None)]


def test_a_step_has_its_own_nodes_and_open_slots() -> None:
    job = {"SLURM_JOB_NODELIST": "node[1-4]", "SLURM_TASKS_PER_NODE": "1"}
    found = slots_of(**job, SLURM_STEP_NODELIST="node[2-3]")
    assert found == [("node2", None), ("node3", None)]
    with pytest.raises(ConfigError, match=r"SLURM_STEP_NODELIST.*node9 is not a node"):
        slots_of(**job, SLURM_STEP_NODELIST="node[2,9]")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, [None, None]),
        ({"SLURM_GPUS_PER_TASK": "2"}, [6, 2]),
        ({"SLURM_GPUS_PER_TASK": "a100:2"}, [6, 2]),
        ({"SLURM_TRES_PER_TASK": "gres:gpu:1"}, [3, 1]),
        ({"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu:a100=1"}, [3, 1]),
        ({"SLURM_TRES_PER_TASK": "cpu=4"}, [None, None]),
        ({"SLURM_TRES_PER_TASK": "cpu:4"}, [None, None]),
    ],
)
def test_how_many_gpus_a_step_must_ask_for(
    variables: dict[str, str], expected: list[int | None]
) -> None:
    job = {"SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "3,1", **variables}
    assert [node.gpus for node in nodes({**JOB, **job})] == expected


def test_the_shell_of_salloc_is_a_step_with_all_nodes() -> None:
    found = slots_of(
        SLURM_JOB_NODELIST="node[1-2]",
        SLURM_STEP_NODELIST="node1",
        SLURM_STEP_ID="4294967290",
        SLURM_TASKS_PER_NODE="1",
    )
    assert found == [("node1", None), ("node2", None)]


@pytest.mark.parametrize(
    ("variables", "both"),
    [
        (
            {"SLURM_JOB_NODELIST": "odin001", "SLURM_TASKS_PER_NODE": "4(x30)"},
            ("4(x30)", "odin001"),
        ),
        (
            {"SLURM_JOB_NODELIST": "node[1-4]", "SLURM_TASKS_PER_NODE": "2(x3)"},
            ("2(x3)", "node[1-4]"),
        ),
        (
            {"SLURM_JOB_NODELIST": "node[1-4]", "SLURM_JOB_NUM_NODES": "2"},
            ("SLURM_JOB_NUM_NODES='2'", "names 4"),
        ),
    ],
)
def test_a_mismatch_is_refused_with_both_values(
    variables: dict[str, str], both: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        nodes({**JOB, **variables})
    assert all(value in caught.value.message for value in both)
    assert "unset" in caught.value.message


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("SLURM_JOB_NODELIST", "node[1-", "']' is missing"),
        ("SLURM_JOB_NODELIST", "node[3-1]", "range 3-1 is reversed"),
        ("SLURM_JOB_NODELIST", "-oProxy[1-2]", "begins with '-'"),
        ("SLURM_JOB_NODELIST", "node 1", "is not a host name"),
        ("SLURM_TASKS_PER_NODE", "two", "'two' is not a count"),
        ("SLURM_TASKS_PER_NODE", "2(x", "is not a count"),
        ("SLURM_JOB_NUM_NODES", "many", "is not a number"),
        ("SLURM_HET_SIZE", "1.5", "is not a number"),
    ],
)
def test_a_variable_that_cannot_be_read_is_shown(
    name: str, value: str, problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        slots_of(**{"SLURM_JOB_NODELIST": "node1", name: value})
    assert f"{name}={value!r}: error: " in caught.value.message
    assert problem in caught.value.message


def test_components_of_a_heterogeneous_job() -> None:
    found = nodes(
        {
            **JOB,
            "SLURM_HET_SIZE": "2",
            # Variables without a suffix describe the first component.
            "SLURM_JOB_NODELIST": "big1",
            "SLURM_TASKS_PER_NODE": "2",
            "SLURM_JOB_NODELIST_HET_GROUP_0": "big1",
            "SLURM_TASKS_PER_NODE_HET_GROUP_0": "2",
            "SLURM_JOB_NODELIST_HET_GROUP_1": "small[1-2]",
            "SLURM_TASKS_PER_NODE_HET_GROUP_1": "1(x2)",
        }
    )
    assert found == (
        SlurmNode(name="big1", slots=2, group=0),
        SlurmNode(name="small1", slots=1, group=1),
        SlurmNode(name="small2", slots=1, group=1),
    )


def test_a_node_of_two_components_counts_once_with_all_its_slots() -> None:
    found = nodes(
        {
            **JOB,
            "SLURM_HET_SIZE": "2",
            "SLURM_JOB_NODELIST_HET_GROUP_0": "a",
            "SLURM_TASKS_PER_NODE_HET_GROUP_0": "2",
            "SLURM_JOB_NODELIST_HET_GROUP_1": "a",
            "SLURM_TASKS_PER_NODE_HET_GROUP_1": "3",
        }
    )
    assert found == (SlurmNode(name="a", slots=5, group=0),)


def test_a_component_without_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="SLURM_HET_SIZE='2'"):
        nodes({**JOB, "SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "a"})


@pytest.mark.parametrize(
    ("variables", "inside"),
    [
        ({}, False),
        ({"SLURM_CONF": "/etc/slurm.conf"}, False),
        ({"SLURM_JOB_ID": "7"}, False),
        ({"SLURM_JOB_ID": "", "SLURM_JOB_NODELIST": "a"}, False),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a"}, True),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST_HET_GROUP_0": "a"}, True),
    ],
)
def test_what_a_job_s_environment_is(variables: dict[str, str], inside: bool) -> None:
    assert is_inside(variables) is inside


def test_several_launchers_of_one_srun_are_refused() -> None:
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    with pytest.raises(StartError, match="4 times"):
        require_one_launcher(step)
    require_one_launcher({**step, "SLURM_STEP_NUM_TASKS": "1"})
    require_one_launcher({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"})  # a batch script
