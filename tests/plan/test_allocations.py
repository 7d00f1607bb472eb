"""Plans within a job's allocation: its hosts, or an error naming the bad variable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.json_formats import assert_format

SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[8-10]"}
SGE = {"JOB_ID": "12", "SGE_TASK_ID": "undefined", "HOSTNAME": "node4"}
HOSTFILE = "node4 2 all.q@node4 UNDEFINED\nnode1 1 all.q@node1 UNDEFINED\n"
PLANS = (["plan"], ["launch", "--dry-run"])


def tfcluster(
    folder: Path, backend: str, variables: dict[str, str], *words: str, more: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command on a configuration with three workers."""
    config = folder / "digits.yaml"
    config.write_text(
        f"backend: {backend}\ncommand: echo hi\ntasks: {{worker: 3}}\n"
        "sge: {parallel_environment: tf, slots: 3}\n"
        f"runtime: {{strategy: none}}\n{more}"
    )
    environ = {
        "PATH": os.environ["PATH"],
        "TFCLUSTER_STATE_DIR": str(folder / "state"),
        **variables,
    }
    return subprocess.run(
        [sys.executable, "-m", "tfcluster", *words, str(config)],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


def hosts_of(folder: Path, backend: str, variables: dict[str, str]) -> dict[str, str]:
    done = tfcluster(folder, backend, variables, "plan", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert_format("plan", plan)
    assert {host["host"] for host in plan["hosts"]} >= {
        task["host"] for task in plan["tasks"]
    }
    return {task["task"]: task["host"] for task in plan["tasks"]}


def test_a_plan_within_a_slurm_job_shows_its_nodes(tmp_path: Path) -> None:
    given = {**SLURM, "SLURM_TASKS_PER_NODE": "2,1(x2)"}
    assert hosts_of(tmp_path, "slurm", given) == {
        "worker:0": "node8",
        "worker:1": "node8",
        "worker:2": "node9",
    }
    done = tfcluster(tmp_path, "slurm", given, "launch", "--dry-run")
    assert done.returncode == 0
    assert done.stderr == (
        "warning: node10 gets no task: 3 tasks fit on 2 of 3 hosts (`spread: true` "
        "gives each host one task first)\n"
    )
    assert "node8:auto" in done.stdout
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(("slots", "hosts"), [("2,1(x2)", True), ("3,1(x2)", False)])
def test_ranks_on_several_hosts_have_no_private_files(
    tmp_path: Path, slots: str, hosts: bool
) -> None:
    given = {**SLURM, "SLURM_TASKS_PER_NODE": slots}
    words = ("--set", "runtime.files=private")
    done = tfcluster(tmp_path, "slurm", given, "plan", *words)
    assert done.returncode == 0
    told = "in spite of 'files: private': they are on several hosts (node[8-9])"
    assert (told in done.stderr) is hosts


def test_tasks_are_spread_over_all_hosts(tmp_path: Path) -> None:
    given = {**SLURM, "SLURM_TASKS_PER_NODE": "8(x3)"}
    done = tfcluster(tmp_path, "slurm", given, "plan", "--json", more="spread: true\n")
    hosts = [task["host"] for task in json.loads(done.stdout)["tasks"]]
    assert (hosts, done.stderr) == (["node8", "node9", "node10"], "")


def test_a_plan_within_a_step_has_the_nodes_of_the_step(tmp_path: Path) -> None:
    step = {"SLURM_STEP_NODELIST": "node9", "SLURM_TASKS_PER_NODE": "1"}
    assert set(hosts_of(tmp_path, "slurm", SLURM | step).values()) == {"node9"}


def test_a_plan_within_a_grid_engine_job_shows_its_hosts(tmp_path: Path) -> None:
    hostfile = tmp_path / "pe_hostfile"
    hostfile.write_text(HOSTFILE)
    assert hosts_of(tmp_path, "sge", {**SGE, "PE_HOSTFILE": str(hostfile)}) == {
        "worker:0": "node4",
        "worker:1": "node4",
        "worker:2": "node1",
    }


@pytest.mark.parametrize("backend", ["slurm", "sge"])
def test_a_plan_outside_of_a_job_shows_nodes_without_names(
    tmp_path: Path, backend: str
) -> None:
    assert "<node 1>" in hosts_of(tmp_path, backend, {}).values()


@pytest.mark.parametrize("words", [*PLANS, ["launch"]])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_JOB_NODELIST", "node[8-"),
        ("SLURM_TASKS_PER_NODE", "2(x9)"),
        ("SLURM_TASKS_PER_NODE", "two"),
    ],
)
def test_a_broken_variable_of_slurm_is_named(
    tmp_path: Path, name: str, value: str, words: list[str]
) -> None:
    done = tfcluster(tmp_path, "slurm", {**SLURM, name: value}, *words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"{name}={value!r}: error: ")
    assert done.stdout == ""
    assert not list((tmp_path / "state").glob("runs/*"))


@pytest.mark.parametrize("words", [*PLANS, ["launch"]])
@pytest.mark.parametrize("text", [None, "node4\n", "node4 two\n", ""])
def test_a_broken_host_file_of_grid_engine_is_named(
    tmp_path: Path, text: str | None, words: list[str]
) -> None:
    hostfile = tmp_path / "pe_hostfile"
    if text is not None:
        hostfile.write_text(text)
    given = {**SGE, "PE_HOSTFILE": str(hostfile)}
    done = tfcluster(tmp_path, "sge", given, *words)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"PE_HOSTFILE={str(hostfile)!r}: error: ")
    assert done.stdout == ""
    assert not list((tmp_path / "state").glob("runs/*"))
