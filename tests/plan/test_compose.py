"""TF_CONFIG (by TensorFlow's rules), argv and environment of tasks."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.plan.descriptions import describe, hosts
from tfcluster.base.errors import StartError
from tfcluster.base.isolated_import import PACKAGE_ROOT
from tfcluster.base.task_id import TaskId
from tfcluster.plan.compose import (
    MAX_ENV_STRING_BYTES,
    Cluster,
    TaskSpec,
    cluster_of,
    compose,
    provisional_cluster,
    warm_specs,
)
from tfcluster.plan.model import (
    Allocation,
    Description,
    Host,
    Runtime,
    Strategy,
    TaskGroup,
)
from tfcluster.plan.placement import place


def specs_of(
    description: Description, allocation: Allocation | None = None, *, tf: bool = True
) -> dict[str, TaskSpec]:
    places = place(description, allocation or hosts(None))
    return {str(s.task): s for s in compose(description, places, lambda _: tf)}


def test_tf_config_has_the_cluster_in_host_order_and_integer_indices() -> None:
    description = describe(
        {"chief": 1, "worker": 2, "ps": 1, "evaluator": 1, "data": 1}
    )
    specs = list(specs_of(description, hosts(None, None)).values())
    ports = {spec.task: 40000 + i for i, spec in enumerate(specs)}
    found = cluster_of(specs, ports)
    config: dict[str, Any] = json.loads(found.tf_config(TaskId("worker", 1)))
    assert config == {
        "cluster": {
            "chief": ["10.0.0.1:40000"],
            "worker": ["10.0.0.1:40001", "10.0.0.2:40002"],
            "ps": ["10.0.0.1:40003"],
        },
        "task": {"type": "worker", "index": 1},
    }


def test_the_evaluator_stands_outside_the_cluster_but_knows_it() -> None:
    found = Cluster({"chief": ("h:1",)})
    config = json.loads(found.tf_config(TaskId("evaluator", 0)))
    assert "evaluator" not in config["cluster"]
    assert config["task"] == {"type": "evaluator", "index": 0}


def test_ipv6_addresses_are_bracketed() -> None:
    host = Host(name="h", address="fd00::1")
    specs = list(specs_of(describe({"worker": 1}), Allocation(hosts=(host,))).values())
    assert cluster_of(specs, {specs[0].task: 7}).jobs == {"worker": ("[fd00::1]:7",)}


def test_a_tf_config_that_the_kernel_would_refuse_is_refused_before() -> None:
    def cluster(workers: int) -> Cluster:
        addresses = (f"node{i:05}.example.org:{i}" for i in range(workers))
        return Cluster({"worker": tuple(addresses)})

    fits = cluster(4000)
    fits.require_fit([TaskId("worker", 3999)])
    text = fits.tf_config(TaskId("worker", 3999))
    assert len(text) < MAX_ENV_STRING_BYTES
    with pytest.raises(StartError, match="131072") as caught:
        cluster(5000).require_fit([TaskId("worker", 0)])
    assert caught.value.hint


def test_the_limit_is_the_kernels_own() -> None:
    import os
    import subprocess

    def runs(length: int) -> bool:
        env = {**os.environ, "X": "x" * (length - len("X=") - 1)}
        try:
            return subprocess.run(["/bin/true"], env=env, check=False).returncode == 0
        except OSError:
            return False

    assert runs(MAX_ENV_STRING_BYTES)
    assert not runs(MAX_ENV_STRING_BYTES + 1)


def test_a_large_cluster_is_refused_in_the_plan_already() -> None:
    specs = list(specs_of(describe({"worker": 9000})).values())
    with pytest.raises(StartError):
        provisional_cluster(specs)


# --- argv -----------------------------------------------------------------------------


def test_python_means_the_configured_interpreter() -> None:
    spec = specs_of(describe({"worker": 1}))["worker:0"]
    assert spec.argv == ("/opt/venv/bin/python", "train.py")
    assert spec.arguments == ("run", "train.py")


def test_the_runtime_is_put_around_python_programs_only() -> None:
    shell = describe({"worker": 1}, command=("bash", "-c", "python train.py"))
    spec = specs_of(shell)["worker:0"]
    assert spec.cold_argv() == ("bash", "-c", "python train.py")
    assert spec.warm is None
    cold = specs_of(describe({"worker": 1}))["worker:0"].cold_argv()
    assert cold[0] == "/opt/venv/bin/python"
    assert cold[3:] == (
        PACKAGE_ROOT,
        "tfcluster.runtime.task.bootstrap",
        "run",
        "train.py",
    )


def test_strategy_none_leaves_the_command_alone() -> None:
    none = Runtime(strategy=Strategy.NONE)
    spec = specs_of(describe({"worker": 1}, runtime=none), tf=False)["worker:0"]
    assert spec.cold_argv() == ("/opt/venv/bin/python", "train.py")


def test_interpreter_options_stay_and_rule_a_fork_out() -> None:
    command = ("python", "-O", "train.py")
    spec = specs_of(describe({"worker": 1}, command=command))["worker:0"]
    assert spec.warm is None
    assert spec.cold_argv()[:3] == ("/opt/venv/bin/python", "-O", "-c")


def test_servers_of_ours_stand_in_for_the_command() -> None:
    tasks: dict[str, int | TaskGroup] = {
        "chief": 1,
        "worker": TaskGroup(count=1, server=True),
        "ps": 1,
    }
    specs = specs_of(describe(tasks, runtime=Runtime(strategy=Strategy.NONE)))
    assert [s.server for s in specs.values()] == [False, True, True]
    assert specs["ps:0"].arguments == ("server",)
    assert "tfcluster.runtime.task.bootstrap" in specs["ps:0"].cold_argv()


def test_a_group_may_have_a_command_of_its_own() -> None:
    tasks: dict[str, int | TaskGroup] = {
        "worker": 1,
        "evaluator": TaskGroup(command=("python", "evaluate.py")),
    }
    specs = specs_of(describe(tasks))
    assert specs["evaluator:0"].arguments == ("run", "evaluate.py")
    assert specs["evaluator:0"].strategy is Strategy.NONE


# --- warm interpreters ----------------------------------------------------------------


def test_tasks_alike_share_one_warm_interpreter() -> None:
    specs = specs_of(describe({"chief": 1, "worker": 3, "ps": 1}))
    assert len(warm_specs(specs.values())) == 1


def test_another_environment_needs_another_one() -> None:
    tasks: dict[str, int | TaskGroup] = {
        "chief": 1,
        "worker": TaskGroup(count=2, env={"OMP_NUM_THREADS": "1"}),
    }
    specs = specs_of(describe(tasks))
    assert len(warm_specs(specs.values())) == 2
    assert specs["worker:0"].warm == specs["worker:1"].warm != specs["chief:0"].warm


def test_no_warm_interpreter_where_none_is_wanted_or_worth_it() -> None:
    off = describe({"worker": 1}, runtime=Runtime(warm_start=False))
    assert specs_of(off)["worker:0"].warm is None
    assert specs_of(describe({"worker": 1}), tf=False)["worker:0"].warm is None


# --- environment ----------------------------------------------------------------------


def test_each_task_gets_its_identity() -> None:
    specs = specs_of(describe({"chief": 1, "worker": 2}), hosts(2, 1))
    assert specs["worker:1"].own_env == {
        "TFCLUSTER_TASK": "worker:1",
        "TFCLUSTER_RANK": "2",
        "TFCLUSTER_SIZE": "3",
        "TFCLUSTER_LOCAL_RANK": "0",
        "TFCLUSTER_LOCAL_SIZE": "1",
        "TFCLUSTER_CROSS_RANK": "1",
        "TFCLUSTER_CROSS_SIZE": "2",
    }


def test_gpus_become_cuda_visible_devices_and_ps_see_none() -> None:
    specs = specs_of(describe({"worker": 2, "ps": 1}), hosts(None, gpus=2))
    found = [s.own_env["CUDA_VISIBLE_DEVICES"] for s in specs.values()]
    assert found == ["0", "1", ""]


def test_what_tasks_share_is_made_once() -> None:
    specs = specs_of(describe({"worker": 3}, env={"A": "1"}))
    assert specs["worker:0"].shared_env is specs["worker:2"].shared_env
    assert specs["worker:0"].shared_env["A"] == "1"


# --- device filters -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "strategy", "ps", "expected"),
    [
        ("worker:1", Strategy.PARAMETER_SERVER, 1, ["/job:ps", "/job:worker/task:1"]),
        ("chief:0", Strategy.REPLICATED, 1, ["/job:ps", "/job:chief/task:0"]),
        ("ps:0", Strategy.PARAMETER_SERVER, 1, []),
        ("worker:1", Strategy.COLLECTIVE, 0, []),
        ("worker:1", Strategy.NONE, 1, ["/job:ps", "/job:worker/task:1"]),
        ("ps:0", Strategy.NONE, 1, []),
        ("evaluator:0", Strategy.NONE, 1, []),
        ("worker:1", Strategy.NONE, 0, []),
    ],
)
def test_device_filters(
    task: str, strategy: Strategy, ps: int, expected: list[str]
) -> None:
    tasks: dict[str, int | TaskGroup] = {"chief": 1, "worker": 2, "evaluator": 1}
    if ps:
        tasks["ps"] = ps
    specs = specs_of(describe(tasks, runtime=Runtime(strategy=strategy)))
    assert specs[task].device_filters == expected
