"""TensorFlow 1 graphs on parameter servers.

The cases are in ``programs/v1/graphs.py``, which runs real servers in one process and
a thread for each worker. All of them run with resource variables, and those where it
matters also with reference variables, which behave differently.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.harness import WarmInterpreter

PROGRAM = Path(__file__).parent / "programs" / "v1" / "graphs.py"
DEADLINE_S = 240.0
CASES = [
    "barrier",
    "barrier_devices",
    "barrier_alone",
    "variable_devices",
    "variable_caching",
    "placement_balance",
    "accumulated_sums",
    "accumulated_mean",
    "accumulated_sparse_mean",
    "variable_reads",
    "workers_in_step",
    "towers_of_one_worker",
    "replicated",
    "replicated_mean",
    "copies_by_name",
    "model_variables",
    "number_of_barriers",
    "other_models",
    "together",
    "shared_name",
]
OF_OLD = [
    "accumulated_sums",
    "accumulated_mean",
    "variable_reads",
    "replicated",
    "model_variables",
]

Found = Mapping[str, Any]


@pytest.fixture(scope="module")
def found(warm: WarmInterpreter, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(warm, tmp_path_factory.mktemp("resources"), "resources", CASES)


@pytest.fixture(scope="module")
def old(warm: WarmInterpreter, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results with reference variables, which preceded resource variables."""
    return run(warm, tmp_path_factory.mktemp("references"), "references", OF_OLD)


@pytest.fixture(params=["resources", pytest.param("old", marks=pytest.mark.slow)])
def either(request: pytest.FixtureRequest) -> Found:
    """The results with resource variables, then with reference variables."""
    name = "old" if request.param == "old" else "found"
    found: Found = request.getfixturevalue(name)
    return found


def run(warm: WarmInterpreter, folder: Path, kind: str, cases: list[str]) -> Found:
    env = {"CUDA_VISIBLE_DEVICES": "", "TF_NUM_INTRAOP_THREADS": "1"}
    ended = warm.start(["run", str(PROGRAM), kind, *cases], folder, env).end(DEADLINE_S)
    assert ended.status == 0, ended.output
    lines = [line for line in ended.output.splitlines() if line.startswith('["')]
    results: dict[str, Any] = dict(json.loads(line) for line in lines)
    assert list(results) == cases
    return results


pytestmark = [
    pytest.mark.slow,
    pytest.mark.tensorflow,
    pytest.mark.timeout(300),
]


def test_nobody_is_more_than_a_step_ahead(found: Found) -> None:
    result = found["barrier"]
    assert result["begun"] == [25, 25, 25]
    # A worker that has passed a barrier finds that all others have reached it.
    assert result["ahead"] == 0
    assert result["behind"] <= 1


def test_queues_go_round_the_parameter_servers(found: Found) -> None:
    result = found["barrier_devices"]
    assert [device[:14] for device in result["devices"]] == (
        ["/job:ps/task:0"] * 3 + ["/job:ps/task:1"] * 3 + ["/job:ps/task:0"] * 3
    )
    assert len(set(result["names"])) == 9


def test_one_worker_waits_for_nobody(found: Found) -> None:
    assert not [kind for kind in found["barrier_alone"] if "Queue" in kind]


def test_all_variables_are_on_a_ps(found: Found) -> None:
    result = found["variable_devices"]
    assert {"w", "w/Adam", "global_step"} <= result["devices"].keys()
    assert all(at.startswith("/job:ps/task:") for at in result["devices"].values())
    # There is one copy: only the model's own variable is trained.
    assert result["masters"] == ["w"]


def test_caching_device(found: Found) -> None:
    result = found["variable_caching"]
    caching, tower = result["errors"]
    assert caching.startswith(
        "caching='tpu': variables are cached on 'cpu' or on 'gpu'"
    )
    assert tower.startswith("a tower must be like 'cpu:0' or 'gpu:1'; found 'here'")
    assert result["gpu"] == "/job:worker/task:0/device:GPU:0"


def test_bytes_are_even(found: Found) -> None:
    result = found["placement_balance"]
    for how in ("whole", "divided"):
        assert result[how]["held"] == result[how]["actual"]
    first, second = result["divided"]["held"]
    assert abs(first - second) < 0.1 * (first + second) / 2
    assert result["divided"]["warning"] is None


def test_a_variable_that_is_too_large_is_named(found: Found) -> None:
    warning = found["placement_balance"]["whole"]["warning"]
    assert warning.startswith("variable vgg/kernel13/part_0 has 74% of all bytes")
    assert "fixed_size_partitioner(2)" in warning


def test_gradients_of_workers_are_applied_as_they_come(either: Found) -> None:
    # w is 1 - 0.5 * (1 + 2), after two steps.
    for worker in either["accumulated_sums"]:
        assert (worker["w"], worker["step"]) == (-0.5, 2)


def test_the_mean_of_gradients_is_applied_once(either: Found) -> None:
    for worker in either["accumulated_mean"]:
        assert (worker["w"], worker["step"]) == (0.25, 1)


def test_the_mean_of_rows(found: Found) -> None:
    # Row 0 has two gradients; the other rows have one each, which is the mean.
    for rows in found["accumulated_sparse_mean"]:
        assert rows == [-0.5, -0.5, -0.5, 0.0]


def test_a_step_reads_a_variable_once(found: Found) -> None:
    # Each of two towers uses the variable in the loss and in its gradient.
    assert found["variable_reads"] == {"cached": 1, "plain": 4}


@pytest.mark.slow
def test_a_step_reads_a_variable_of_old_once_for_each_tower(old: Found) -> None:
    assert old["variable_reads"] == {"cached": 1, "plain": 2}


def test_a_step_ends_with_all_workers(found: Found) -> None:
    least, most = found["workers_in_step"]
    # All three workers have applied theirs; some may already be in the next step.
    assert least >= 0
    assert most <= 2


def test_copies_equal_the_master_copy(either: Found) -> None:
    workers = either["replicated"]
    for worker in workers:
        assert worker["equal"] == [True] * 8
        assert worker["moved"] == [True] * 8
        assert worker["last"] == workers[0]["last"]
        assert all(at.startswith("/job:ps") for at in worker["slots"])
        assert len(worker["slots"]) == 2


def test_copies_train_with_the_mean_of_workers(found: Found) -> None:
    for worker in found["replicated_mean"]:
        assert (worker["w"], worker["own"], worker["step"]) == (0.25, [0.25], 1)


def test_copies_of_variables_are_found_by_name(found: Found) -> None:
    renamed, strange = found["copies_by_name"]
    assert "tower 1 misses dense/kernel and also has dense_1/kernel" in renamed
    assert "get_variable" in strange
    assert "tower0/stray" in strange


def test_model_variables_are_the_chiefs(either: Found) -> None:
    result = either["model_variables"]
    chief, *others = result
    assert chief["syncs"]
    assert not any(other["syncs"] for other in others)
    assert (chief["name"], chief["trained"]) == ("norm/moving_mean", False)
    # The copy on the ps stays zero until sync_model_variables has run.
    assert {worker["before"] for worker in (chief, *others)} == {0.0}
    for worker in (chief, *others):
        assert worker["master_copy"] == chief["own"]
    assert len({worker["own"] for worker in (chief, *others)}) == 3


def test_who_comes_late_begins_with_what_is_there(either: Found) -> None:
    for worker in either["model_variables"]:
        assert worker["fresh"] == 0.0
        assert worker["late"] == [True, True]


def test_barriers_do_not_grow_with_variables(found: Found) -> None:
    assert found["number_of_barriers"] == [[2, 2], [2, 2]]


def test_another_model_is_named_readably(found: Found) -> None:
    first, second, third = found["other_models"]
    assert (first, third) == ("trains", "trains")
    assert second.startswith(
        "worker:1 has a different model from worker:0, the chief: missing here: "
        "dense/kernel float32 (2, 3)"
    )
    assert "not on the chief: dense_1/kernel float32 (2, 3)" in second


def test_the_mean_over_towers_is_used(found: Found) -> None:
    # Two workers, each with gradients 1 and 5: 1 - 0.5 * (3 + 3).
    result = found["towers_of_one_worker"]
    for how in ("parameter_server", "replicated"):
        assert [worker["w"] for worker in result[how]] == [-2.0, -2.0]
    for worker in result["replicated"]:
        assert worker["own"] == [-2.0, -2.0]


def test_workers_end_together(found: Found) -> None:
    # The second worker leaves after its third step; the others notice in their fourth.
    for steps in found["together"].values():
        assert steps == [4, 3, 4]


def test_two_sessions_see_one_queue(found: Found) -> None:
    assert found["shared_name"] == [3, 1, 4]
