"""Hosts, own host name and GPUs from a job's environment."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.plan.descriptions import describe
from tfcluster import schedulers
from tfcluster.base.errors import ConfigError, StartError
from tfcluster.schedulers.job_hosts import gpus_given, is_one_of, own_names
from tfcluster.schedulers.sge import GPU_VARIABLES, SCHEDULER

JOB = {"JOB_ID": "12", "SGE_TASK_ID": "undefined", "HOSTNAME": "node4.cluster.test"}
FILE = """\
node4.cluster.test 2 all.q@node4.cluster.test UNDEFINED
node1.cluster.test 1 all.q@node1.cluster.test UNDEFINED
node1.cluster.test 2 long.q@node1.cluster.test UNDEFINED
"""


def job(folder: Path, **variables: str) -> dict[str, str]:
    path = folder / "pe_hostfile"
    path.write_text(FILE)
    return {**JOB, "PE_HOSTFILE": str(path), **variables}


def test_hosts_come_under_exactly_the_names_of_the_file(tmp_path: Path) -> None:
    allocation = SCHEDULER.allocate(describe({"worker": 2}), job(tmp_path))
    assert [(host.name, host.slots) for host in allocation.hosts] == [
        ("node4.cluster.test", 2),
        ("node1.cluster.test", 3),
    ]


def test_only_this_hosts_gpus_are_known(tmp_path: Path) -> None:
    env = job(tmp_path, CUDA_VISIBLE_DEVICES="2,3")
    hosts = SCHEDULER.allocate(describe({"worker": 2}), env).hosts
    assert [host.gpus for host in hosts] == [("2", "3"), None]


def test_the_backend_is_registered() -> None:
    assert schedulers.get("sge") is SCHEDULER


def test_outside_a_job_there_are_no_hosts(tmp_path: Path) -> None:
    env = job(tmp_path)
    del env["JOB_ID"]
    with pytest.raises(StartError, match="not inside a job of Grid Engine") as caught:
        SCHEDULER.allocate(describe({"worker": 2}), env)
    assert "tfcluster submit" in str(caught.value.hint)


def test_variables_of_another_scheduler_make_no_job() -> None:
    with pytest.raises(StartError, match="not inside a job of Grid Engine"):
        SCHEDULER.allocate(describe({"worker": 2}), {"JOB_ID": "12"})


def test_a_hostfile_that_is_elsewhere_is_reported(tmp_path: Path) -> None:
    env = {**JOB, "PE_HOSTFILE": str(tmp_path / "gone")}
    with pytest.raises(ConfigError, match="No such file") as caught:
        SCHEDULER.allocate(describe({"worker": 2}), env)
    assert f"PE_HOSTFILE={env['PE_HOSTFILE']!r}: error: " in caught.value.message
    assert "on the host of its script" in caught.value.message


def test_an_invalid_hostfile_is_reported_with_its_line(tmp_path: Path) -> None:
    env = job(tmp_path)
    Path(env["PE_HOSTFILE"]).write_text("node4 2 all.q@node4\nnode1\n")
    with pytest.raises(ConfigError) as caught:
        SCHEDULER.allocate(describe({"worker": 2}), env)
    assert (
        f"PE_HOSTFILE={env['PE_HOSTFILE']!r}: error: line 2: 'node1' has too few"
        in (caught.value.message)
    )


@pytest.mark.parametrize(("name", "value"), [("PE", "tf")])
def test_a_parallel_job_without_a_hostfile_is_reported(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SCHEDULER.allocate(describe({"worker": 2}), {**JOB, name: value})
    assert (
        f"PE_HOSTFILE: error: is not set, but the job is a parallel one: {name}="
        in (caught.value.message)
    )


def test_a_job_without_parallel_environment_has_one_slot_here() -> None:
    (host,) = SCHEDULER.allocate(describe({"worker": 2}), JOB).hosts
    assert (host.name, host.slots) == ("node4.cluster.test", 1)


def test_a_job_of_one_host_needs_no_qrsh(tmp_path: Path) -> None:
    SCHEDULER.starter(describe({"worker": 2}), {**JOB, "PATH": str(tmp_path)})


def test_missing_qrsh_is_found_out_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="qrsh"):
        SCHEDULER.starter(describe({"worker": 2}), job(tmp_path, PATH=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "own", "same"),
    [
        ("node1", "node1", True),
        ("node1.cluster.test", "node1", True),
        ("node1", "node1.cluster.test", True),
        ("Node1.Cluster.Test", "node1.cluster.test", True),
        ("node1.a.test", "node1.b.test", False),
        ("node1", "node11", False),
        ("node11.cluster.test", "node1", False),
    ],
)
def test_one_host_by_its_names(name: str, own: str, same: bool) -> None:
    assert is_one_of(name, [own]) is same


def test_grid_engines_own_name_for_this_host_counts_as_well_as_the_kernels() -> None:
    names = own_names({"HOSTNAME": "Alias-ib.test"})
    assert names == ("alias-ib.test", socket.gethostname().lower())
    assert own_names({}) == (os.uname().nodename.lower(),)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, ("0", "1")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ()),
        (
            {"CUDA_VISIBLE_DEVICES": "GPU-8f6-0a, MIG-9c1/1/0"},
            ("GPU-8f6-0a", "MIG-9c1/1/0"),
        ),
        ({"SGE_HGR_gpu": "1 3"}, ("1", "3")),
        ({"SGV_HGR_gpu": "2"}, ("2",)),
        ({"SGE_GPU": "0,2"}, ("0", "2")),
        ({"CUDA_VISIBLE_DEVICES": "5", "SGE_HGR_gpu": "1"}, ("5",)),
        ({"SGE_HGR_gpu": "cuda0 cuda1"}, None),
        ({"SGE_HGR_gpu": "1;rm"}, None),
    ],
)
def test_gpus_are_those_that_were_given(
    variables: dict[str, str], expected: tuple[str, ...] | None
) -> None:
    assert gpus_given(variables, GPU_VARIABLES) == expected
