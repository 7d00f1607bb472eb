"""The Python API on one to five ranks.

The ranks run the checks in ``programs/api_*.py``, and the tests read their results.
Each program runs once for each number of ranks. The default tier uses the first number,
``make test-all`` those in ``SLOW_SIZES``, and ``make test-exhaustive`` all.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

from tests.kit.ranks import ROOT, Job, Jobs, Ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

SIZES = {
    "api_tensors.py": (3, 1, 2, 4, 5),
    "api_training.py": (2, 1, 3),
    "api_graph.py": (2, 1, 3),
    "api_differing.py": (3,),
}
EXAMPLE_SIZES = {"ranks.py": (2, 1, 4), "linear_regression.py": (2, 1, 4)}
SLOW_SIZES = {
    "api_tensors.py": 1,
    "api_training.py": 2,
    "api_graph.py": 2,
    "linear_regression.py": 1,
}
# The servers of TF1 sessions listen on the ports that the ranks use.
ENVIRONMENT = {"TF_GRPC_REUSE_PORT": "true"}

TENSORS = {
    "init": ["init"],
    "ranks": ["ranks"],
    "allreduce": [
        "allreduce_every_dtype_and_operation",
        "allreduce_in_a_function",
        "allreduce_large_and_empty",
        "allreduce_defaults",
        "allreduce_refusals",
        "allreduce_sums_halves_in_float32",
        "allreduce_factors",
        "allreduce_gradients",
    ],
    "slices": ["slices"],
    "allgather": ["allgather"],
    "operations": [
        "compression",
        "grouped",
        "broadcast",
        "alltoall",
        "reducescatter",
        "no_gradient_of_a_maximum",
        "gradients_of_variables_and_beside_integers",
        "half_gradients",
        "factors_of_doubles_are_exact",
        "the_second_argument_of_allgather_may_be_the_name",
        "global_variables_are_none_of_eager_execution",
        "retraced_on_one_rank_only",
        "order_in_a_graph",
        "objects",
        "barrier_and_shutdown",
    ],
}
TRAINING = {
    "keeps_its_class": ["optimizer_class_and_config_stay", "optimizer_is_saved"],
    "trains_alike": [
        "training_loops_are_those_of_one_process",
        "training_fit_is_that_of_one_process",
        "training_old_optimizers_in_eager_code",
    ],
    "no_gradient": ["no_gradient_is_left_out"],
    "operations": [
        "claimed_from_the_text",
        "ranks_draw_numbers_of_their_own",
        "settings",
        "several_passes",
        "slices",
        "tape",
        "a_step_that_overflows_on_one_rank_is_taken_by_none",
        "callbacks",
        "momentum_is_corrected",
        "broadcast_of_a_built_model",
    ],
}
GRAPH = {
    "allreduce": ["allreduce_in_a_graph", "allreduce_gradients_in_a_graph"],
    "slices": ["slices_in_a_graph"],
    "order": ["order_in_graphs", "order_names_are_keys"],
    "trains_alike": ["training_old_optimizers", "optimizer_delegates"],
    "sessions": [
        "session_api",
        "session_ranks_can_be_fetched",
        "session_gpu",
        "session_hook",
        "session_cluster",
    ],
    "operations": [
        "more_exchanges_than_threads",
        "after_a_mismatch_all_go_on",
        "functions_in_a_graph",
        "errors_of_a_session",
    ],
}
DIFFERING = {
    "mismatches": [
        "mismatch_eagerly",
        "mismatch_in_a_function",
        "mismatch_of_variables",
        "mismatch_of_objects",
        "after_a_mismatch_all_go_on",
    ],
    "order": ["order_of_opposite_threads", "order_opposite_by_name"],
    "no_gradient": ["no_gradient_on_one_rank"],
}
CHECKS = {
    "api_tensors.py": TENSORS,
    "api_training.py": TRAINING,
    "api_graph.py": GRAPH,
    "api_differing.py": DIFFERING,
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ranks]:
    checks = [
        Job(f"{script}-{size}", size, script, env=ENVIRONMENT)
        for script, sizes in SIZES.items()
        for size in sizes
    ]
    examples = [
        Job(f"{script}-{size}", size, str(ROOT / "examples" / script))
        for script, sizes in EXAMPLE_SIZES.items()
        for size in sizes
    ]
    folder = tmp_path_factory.mktemp("a")
    return Jobs(folder, [*checks, *examples], timeout_s=580)


def outcomes(ranks: Ranks) -> list[dict[str, str]]:
    """Each rank's result of each check."""
    found = []
    for output in ranks.outputs:
        lines = [line for line in output.splitlines() if line.startswith("{")]
        assert lines, output
        found.append(json.loads(lines[-1]))
    return found


def passed(jobs: Mapping[str, Ranks], script: str, check: str, size: int) -> None:
    for rank, found in enumerate(outcomes(jobs[f"{script}-{size}"])):
        said = found[check]
        assert said == "ok", f"rank {rank} of {size}: {said}"


def of_tier(script: str, size: int) -> Sequence[pytest.MarkDecorator]:
    if size == SLOW_SIZES.get(script):
        return (pytest.mark.slow,)
    default = size == {**SIZES, **EXAMPLE_SIZES}[script][0]
    return () if default else (pytest.mark.exhaustive,)


def of_subject(item: str) -> pytest.MarkDecorator:
    """Parametrize with the checks of one item, in all programs."""
    return pytest.mark.parametrize(
        ("script", "check", "size"),
        [
            pytest.param(
                script,
                check,
                size,
                id=f"{check}-{size}",
                marks=of_tier(script, size),
            )
            for script, items in CHECKS.items()
            for check in items.get(item, ())
            for size in SIZES[script]
        ],
    )


def each_size(example: str) -> pytest.MarkDecorator:
    """Parametrize with the numbers of ranks that an example runs on."""
    return pytest.mark.parametrize(
        "size",
        [
            pytest.param(size, marks=of_tier(example, size))
            for size in EXAMPLE_SIZES[example]
        ],
    )


@of_subject("init")
def test_init(jobs: Mapping[str, Ranks], script: str, check: str, size: int) -> None:
    passed(jobs, script, check, size)


@of_subject("ranks")
def test_ranks(jobs: Mapping[str, Ranks], script: str, check: str, size: int) -> None:
    passed(jobs, script, check, size)


@of_subject("allreduce")
def test_allreduce(
    jobs: Mapping[str, Ranks], script: str, check: str, size: int
) -> None:
    passed(jobs, script, check, size)


@of_subject("slices")
def test_slices(jobs: Mapping[str, Ranks], script: str, check: str, size: int) -> None:
    passed(jobs, script, check, size)


@of_subject("allgather")
def test_allgather(
    jobs: Mapping[str, Ranks], script: str, check: str, size: int
) -> None:
    passed(jobs, script, check, size)


@of_subject("mismatches")
def test_mismatches(
    jobs: Mapping[str, Ranks], script: str, check: str, size: int
) -> None:
    passed(jobs, script, check, size)


@of_subject("order")
def test_order(jobs: Mapping[str, Ranks], script: str, check: str, size: int) -> None:
    passed(jobs, script, check, size)


@of_subject("keeps_its_class")
def test_keeps_its_class(
    jobs: Mapping[str, Ranks], script: str, check: str, size: int
) -> None:
    passed(jobs, script, check, size)


@of_subject("trains_alike")
def test_trains_alike(
    jobs: Mapping[str, Ranks], script: str, check: str, size: int
) -> None:
    passed(jobs, script, check, size)


@of_subject("no_gradient")
def test_no_gradient(
    jobs: Mapping[str, Ranks], script: str, check: str, size: int
) -> None:
    passed(jobs, script, check, size)


@of_subject("sessions")
def test_sessions(
    jobs: Mapping[str, Ranks], script: str, check: str, size: int
) -> None:
    passed(jobs, script, check, size)


@of_subject("operations")
def test_operations(
    jobs: Mapping[str, Ranks], script: str, check: str, size: int
) -> None:
    passed(jobs, script, check, size)


@pytest.mark.exhaustive  # it waits for every program
def test_no_check_is_left_out(jobs: Mapping[str, Ranks]) -> None:
    for script, items in CHECKS.items():
        (found, *_) = outcomes(jobs[f"{script}-{SIZES[script][0]}"])
        assert set(found) == {check for checks in items.values() for check in checks}


_ELSEWHERE = """
import sys
sys.modules["tfcluster"] = None
import keras
model = keras.models.load_model(sys.argv[1])
print(type(model.optimizer).__name__, int(model.optimizer.iterations))
"""


@pytest.mark.slow
def test_files_are_loaded_where_there_is_no_tfcluster(
    jobs: Mapping[str, Ranks],
) -> None:
    file = jobs["api_training.py-2"].folder / "by-rank-0.keras"
    done = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE, str(file)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "Adam 2\n"


@each_size("ranks.py")
def test_every_rank_says_who_it_is(jobs: Mapping[str, Ranks], size: int) -> None:
    ranks = jobs[f"ranks.py-{size}"]
    assert ranks.exit_codes == [0] * size, ranks.outputs
    for rank, output in enumerate(ranks.outputs):
        assert f"rank {rank}, on its host {rank} of {size}" in output
    assert f"there are {size} ranks on 1 hosts" in ranks.outputs[0]


@each_size("linear_regression.py")
def test_a_regression_is_the_same_on_any_number_of_ranks(
    jobs: Mapping[str, Ranks], size: int
) -> None:
    ranks = jobs[f"linear_regression.py-{size}"]
    assert ranks.exit_codes == [0] * size, ranks.outputs
    chief, *others = ranks.outputs
    assert "step 200: average loss 0.01" in chief
    assert not any("average loss" in output for output in others)
    found = re.findall(r"average loss (\S+)\nfirst weight (\S+),", chief)
    assert found == [("0.0103", "-0.996")]
