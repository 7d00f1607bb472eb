"""Divided functions that exchange by TensorFlow's collective ops.

A job runs when a test first needs its results.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.kit.ranks import Job, Jobs, Ranks
from tests.kit.time_limits import allow_s
from tests.runtime import keras_jobs
from tests.runtime.keras_checks import (
    HALF_PRECISION,
    MARKS,
    assert_equal_on_all_ranks,
    assert_equal_to_one,
    equal_of,
)
from tests.runtime.keras_jobs import Tier

pytestmark = MARKS

PROGRAM = "graph_steps.py"
STALL_S = 4
THEMES = {
    "inputs": 2,
    "models": 2,
    "optimizers": 2,
    "loops": 3,
    "changed_gradients": 2,
    "coupled_rows": 2,
}
"""The themes of ``programs/cases`` that run here, and on how many ranks."""
TIERS: dict[Tier, dict[str, list[str]]] = {
    Tier.DEFAULT: {"models": ["batch_normalization_of_all_rows"]},
    Tier.SLOW: {
        "inputs": ["batches_of_one"],
        "models": ["several_steps_per_execution"],
        "optimizers": ["mixed_precision"],
        "loops": ["tape_with_batch_normalization", "several_batches_in_a_step"],
        "changed_gradients": ["clipped_by_global_norm_in_a_graph"],
        "coupled_rows": ["sum_of_squares"],
    },
    Tier.EXHAUSTIVE: {
        "inputs": ["fit"],
        "models": [
            *("embedding", "frozen", "own_train_step", "positions", "segments"),
            "positions_of_any_length",
        ],
        "optimizers": ["averaged_weights", "clipped"],
        "loops": [
            *("tape_in_one_function", "gan", "tape_builds_its_model"),
            *("two_optimizers", "on_batch", "tape_compiled_by_xla"),
        ],
        "changed_gradients": ["with_noise"],
    },
}
"""The most telling cases, by tier and theme; TFCLUSTER_TEST_ALL_SIZES=1 runs all."""
if keras_jobs.EVERYTHING:
    TIERS = {
        Tier.EXHAUSTIVE: {
            theme: [
                *equal_of(theme),
                *(HALF_PRECISION if theme == "optimizers" else []),
            ]
            for theme in THEMES
        }
    }
GPUS = {
    "auto": [["a 0"], ["a 1"], ["b 0"]],
    "auto_shared": [["a 0"], ["b 0"], ["a 0"]],
    "auto_lacking": [["a 0"], ["a 1"], []],
}
"""What ranks say of their GPUs, by job."""
KILLED = ("killed", "killed_in_a_step")
on_a_gpu = pytest.mark.skipif(
    os.environ.get("TFCLUSTER_TEST_GPU") != "1",
    reason="without TFCLUSTER_TEST_GPU=1, which needs a GPU and root",
)


def environment(**options: object) -> dict[str, str]:
    # So small that each of these models has several buckets.
    runtime = {"transport": "tensorflow", "bucket_mb": 0.0005, **options}
    return {"TFCLUSTER_RUNTIME": json.dumps(runtime), "TF_GRPC_REUSE_PORT": "1"}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ranks]:
    deeds = [
        *(
            "placed",
            "placed_apart",
            "failing",
            "left_to_the_host",
            *KILLED,
            "frozen",
            "own_error",
            "diverging",
        ),
        "unlike_data",
        *("late", "late_in_a_step"),
    ]
    found = []
    for deed in deeds:
        stall = {"stall_timeout_s": STALL_S} if deed.startswith("late") else {}
        found.append(Job(deed, 3, PROGRAM, (deed,), environment(**stall)))
    told = environment() | {"NCCL_DEBUG": "INFO"}
    found.append(Job("reduced_by_nccl", 3, PROGRAM, ("placed",), told))
    for name, gpus in GPUS.items():
        auto = environment(transport="auto") | {"TFCLUSTER_OWN_GPUS": "1"}
        found.append(Job(name, 3, PROGRAM, ("auto", json.dumps(gpus)), auto))
    return Jobs(tmp_path_factory.mktemp("deeds"), found, timeout_s=150)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Jobs]:
    folder = tmp_path_factory.mktemp("cases")
    found = []
    for tier, themes in TIERS.items():
        for theme, chosen in themes.items():
            name = f"{tier.value}-{theme}"
            words = (str(folder / name), *chosen)
            script = f"cases/{theme}.py"
            found.append(Job(name, THEMES[theme], script, words, environment()))
    return folder, Jobs(folder, found, keras_jobs.LIMIT_S, must_succeed=True)


def said(
    jobs: Mapping[str, Ranks], deed: str, codes: list[int] | None = None
) -> list[Any]:
    """The last line of JSON of each rank that wrote one."""
    ended = jobs[deed]
    assert codes in (None, ended.exit_codes), ended.outputs
    found = []
    for output in ended.outputs:
        lines = [line for line in output.splitlines() if line.startswith("{")]
        found += [json.loads(line) for line in lines[-1:]]
    return found


@pytest.mark.parametrize(
    ("tier", "theme", "case"),
    [
        pytest.param(tier, theme, case, id=f"{theme}-{case}", marks=tier.marks)
        for tier, themes in TIERS.items()
        for theme, cases in themes.items()
        for case in cases
    ],
)
def test_ranks_train_what_one_process_trains(
    cases: tuple[Path, Jobs],
    outcomes: keras_jobs.Outcomes,
    tier: Tier,
    theme: str,
    case: str,
) -> None:
    folder, jobs = cases

    def values(job: str, rank: int) -> keras_jobs.Values:
        assert jobs[job]
        found = np.load(folder / f"{job}-{rank}.npz")
        start = f"{case}/"
        own = {key[len(start) :]: found[key] for key in found if key.startswith(start)}
        assert "error" not in own, str(own.get("error"))
        return own

    ranks = [values(f"{tier.value}-{theme}", rank) for rank in range(THEMES[theme])]
    assert_equal_on_all_ranks(ranks)
    tolerance = 2e-2 if case in HALF_PRECISION else None
    assert_equal_to_one(outcomes.alone(case), ranks[0], tolerance=tolerance)


@pytest.mark.parametrize(
    ("deed", "device"),
    [("placed", 0), pytest.param("placed_apart", 1, marks=pytest.mark.exhaustive)],
)
def test_a_step_contains_collective_ops_and_no_python(
    jobs: Mapping[str, Ranks], deed: str, device: int
) -> None:
    ranks = said(jobs, deed, [0, 0, 0])
    tasks = ["chief/replica:0/task:0", "worker/replica:0/task:0"]
    tasks.append("worker/replica:0/task:1")
    keys = []
    for rank, task in zip(ranks, tasks, strict=True):
        assert {kind for kind, *_ in rank["ops"]} <= {
            "CollectiveGatherV2",
            "CollectiveReduceV2",
        }
        places = [(kind, name[-1]) for kind, name, *_ in rank["ops"]]
        assert all(one[1].startswith(f"/job:{task}/") for one in rank["ops"])
        # Two of BatchNormalization, and the buckets.
        assert places.count(("CollectiveReduceV2", str(device))) >= 6, places
        keys.append([key for _, _, key, *_ in rank["ops"]])
        assert len(set(keys[-1])) == len(keys[-1])
        assert rank["weights"] == ranks[0]["weights"]
    assert keys[0] == keys[1] == keys[2]


def test_what_the_ops_do_not_support_is_left_to_the_host(
    jobs: Mapping[str, Ranks],
) -> None:
    ranks = said(jobs, "left_to_the_host", [0, 0, 0])
    for rank in ranks:
        expected = {"CollectiveGatherV2", "CollectiveReduceV2", "PyFunc"}
        assert expected <= set(rank["kinds"])
        assert rank["texts"] == ranks[0]["texts"]


@on_a_gpu
def test_nccl_reduces_gradients_on_gpus(jobs: Mapping[str, Ranks]) -> None:
    for rank in said(jobs, "reduced_by_nccl", [0, 0, 0]):
        places = {op[1].rpartition("device:")[2] for op in rank["ops"]}
        assert places == {"GPU:0"}
    for output in jobs["reduced_by_nccl"].outputs:
        assert "nranks 3" in output
        assert "Init COMPLETE" in output


@pytest.mark.slow
def test_a_program_may_catch_an_error_of_its_own_step(
    jobs: Mapping[str, Ranks],
) -> None:
    ranks = said(jobs, "failing", [0, 0, 0])
    for rank in ranks:
        assert rank["failing"]["failed"] == 2
        assert rank["failing"]["weights"] == ranks[0]["failing"]["weights"]


@pytest.mark.slow
def test_auto_is_tensorflow_if_each_rank_has_a_gpu(jobs: Mapping[str, Ranks]) -> None:
    for rank in said(jobs, "auto", [0, 0, 0]):
        assert rank["uses_ops"] is True
        assert rank["own"].startswith("/job:"), rank["own"]
        kinds = {kind for kind, *_ in rank["ops"]}
        assert "CollectiveReduceV2" in kinds
        assert "PyFunc" not in kinds
        # A second CPU stands for the GPU.
        places = {device[-1] for kind, device, *_ in rank["ops"] if "Reduce" in kind}
        assert "1" in places


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "why"),
    [
        ("auto_lacking", "rank 2 has no GPU that TensorFlow can use"),
        pytest.param(
            "auto_shared",
            "rank 0 and rank 2 share GPU 0 of a",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_auto_is_host_if_a_rank_has_no_gpu_to_itself(
    jobs: Mapping[str, Ranks], deed: str, why: str
) -> None:
    ranks = said(jobs, deed, [0, 0, 0])
    (expected,) = {tuple(rank["weights"]) for rank in said(jobs, "placed", [0, 0, 0])}
    for rank in ranks:
        assert rank["uses_ops"] is False
        # No server of TensorFlow has started.
        assert rank["own"].startswith("/job:localhost/"), rank["own"]
        assert "Collective" not in str(rank["ops"])
        assert rank["why"] == why
        assert rank["weights"] == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_buckets_begin_before_the_backward_pass_ends(
    jobs: Mapping[str, Ranks],
) -> None:
    for rank in said(jobs, "placed_apart", [0, 0, 0]):
        buckets = [passed for _, device, _, passed in rank["ops"] if device[-1] == "1"]
        # The first one waits for the gradients of the last layer only.
        assert min(buckets) < max(buckets) / 2, buckets


@pytest.mark.exhaustive
def test_another_device_changes_no_result(jobs: Mapping[str, Ranks]) -> None:
    one, other = (said(jobs, each, [0, 0, 0])[0] for each in ("placed", "placed_apart"))
    assert one["weights"] == pytest.approx(other["weights"], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "deed", ["killed", pytest.param("killed_in_a_step", marks=pytest.mark.slow)]
)
def test_a_rank_that_is_killed_is_named_at_once(
    jobs: Mapping[str, Ranks], deed: str
) -> None:
    ranks = said(jobs, deed, [0, 0, -9])
    assert len(ranks) == 2
    for rank in ranks:
        kind, text = rank["error"]
        assert kind == "PeerLostError"
        assert text.startswith("rank 2 has left: its process ended"), text
        assert text.endswith("multi_step_on_iterator)"), text
        assert rank["seconds"] < allow_s(2)


@pytest.mark.slow
def test_a_rank_that_is_late_is_named(jobs: Mapping[str, Ranks]) -> None:
    for rank in said(jobs, "late_in_a_step", [0, 0, 0]):
        kind, text = rank["error"]
        assert kind == "CollectiveTimeoutError"
        assert f"has waited {STALL_S} s; rank 2 has not entered exchange " in text
        assert ": exchanges of multi_step_on_iterator (waiting for" in text
        assert STALL_S <= rank["seconds"] < STALL_S + allow_s(6)


@pytest.mark.slow
def test_a_rank_that_is_late_for_a_step_is_named(jobs: Mapping[str, Ranks]) -> None:
    errors = [rank["error"] for rank in said(jobs, "late", [0, 0, 0])]
    # The first rank that gives up leaves; others see that.
    assert {kind for kind, _ in errors} <= {"CollectiveTimeoutError", "PeerLostError"}
    assert all("rank 2 has" in text for _, text in errors), errors


@pytest.mark.slow
def test_a_rank_with_other_gradients_is_named(jobs: Mapping[str, Ranks]) -> None:
    for rank in said(jobs, "frozen", [0, 0, 0]):
        kind, text = rank["error"]
        assert kind == "CollectiveMismatchError"
        different = (
            "multi_step_on_iterator: the ranks have different numbers of tensors"
        )
        assert f"exchanges of {different}" in text
        assert "rank 0, 1: 10; rank 2: 8; rank 0 has " in text


@pytest.mark.slow
def test_a_programs_own_error_stays_its_own(jobs: Mapping[str, Ranks]) -> None:
    *others, last = said(jobs, "own_error", [0, 0, 0])
    assert last["error"][0] == "InvalidArgumentError"
    assert "ValueError: bad row" in last["error"][1]
    for kind, text in (rank["error"] for rank in others):
        assert kind == "PeerLostError"
        assert text.startswith("rank 2 has left: exchange ")
        assert "was aborted: InvalidArgumentError: ValueError: bad row" in text


@pytest.mark.slow
def test_ranks_with_other_data_train_on_the_chiefs(jobs: Mapping[str, Ranks]) -> None:
    ranks = said(jobs, "unlike_data", [0, 0, 0])
    assert all(rank["weights"] == ranks[0]["weights"] for rank in ranks)
    assert "the ranks have different batches" in jobs["unlike_data"].outputs[0]


@pytest.mark.slow
def test_ranks_that_no_longer_train_the_same_are_noticed(
    jobs: Mapping[str, Ranks],
) -> None:
    ranks = said(jobs, "diverging")
    assert len(ranks) == 3
    for rank in ranks:
        kind, text = rank["error"]
        assert kind == "CollectiveError", repr(text)
        assert "the ranks do not train the same model: " in text
        assert "differs between rank 0 and rank 2" in text
