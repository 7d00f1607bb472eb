"""The Python API on one to five ranks: every test looks at what the ranks have found.

The checks themselves stand in ``programs/api_*.py``; each program runs once for each
number of ranks, of which the default tier uses the first.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence

import pytest

from tests.runtime.ranks import ROOT, Job, Jobs, Ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(600)]

SIZES = {
    "api_tensors.py": (2, 1, 3, 4, 5),
    "api_training.py": (3, 1),
    "api_graph.py": (3, 1, 2),
    "api_differing.py": (3,),
}
EXAMPLES = ("ranks.py", "linear_regression.py")
EXAMPLE_SIZES = (2, 1, 4)
# The servers of a graph's sessions listen where the ranks do.
ENVIRONMENT = {"TF_GRPC_REUSE_PORT": "true"}

TENSORS = {
    "1": ["a1_init"],
    "2": ["a2_ranks"],
    "4": [
        "a4_every_dtype_and_operation",
        "a4_in_a_function",
        "a4_large_and_empty",
        "a4_defaults",
        "a4_refusals",
        "a4_halves_are_summed_in_float32",
        "a4_factors",
        "a4_gradients",
    ],
    "5": ["a5_slices"],
    "6": ["a6_allgather"],
    "": [
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
    "9": ["a9_class_and_config_stay", "a9_saved"],
    "10": [
        "a10_loops_are_those_of_one_process",
        "a10_fit_is_that_of_one_process",
        "a10_old_optimizers_in_eager_code",
    ],
    "11": ["a11_what_has_no_gradient_is_left_out"],
    "": [
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
    "4": ["a4_in_a_graph", "a4_gradients_in_a_graph"],
    "5": ["a5_in_a_graph"],
    "8": ["a8_graphs_have_an_order", "a8_names_are_keys"],
    "10": ["a10_old_optimizers", "a10_delegates"],
    "12": [
        "a12_session",
        "a12_ranks_can_be_fetched",
        "a12_gpu",
        "a12_hook",
        "a12_cluster",
    ],
    "": [
        "more_exchanges_than_threads",
        "after_a_mismatch_all_go_on",
        "functions_in_a_graph",
        "errors_of_a_session",
    ],
}
DIFFERING = {
    "7": [
        "a7_eagerly",
        "a7_in_a_function",
        "a7_variables",
        "a7_objects",
        "a7_all_may_go_on",
    ],
    "8": ["a8_threads_in_opposite_order", "a8_opposite_order_by_name"],
    "11": ["a11_none_on_one_rank"],
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
        for script in EXAMPLES
        for size in EXAMPLE_SIZES
    ]
    folder = tmp_path_factory.mktemp("a")
    return Jobs(folder, [*checks, *examples], timeout_s=580)


def outcomes(ranks: Ranks) -> list[dict[str, str]]:
    """What each rank says of each check."""
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


def of_tier(size: int, sizes: Sequence[int]) -> Sequence[pytest.MarkDecorator]:
    return () if size == sizes[0] else (pytest.mark.slow,)


def of_item(item: str) -> pytest.MarkDecorator:
    """The checks of one item, in all programs."""
    return pytest.mark.parametrize(
        ("script", "check", "size"),
        [
            pytest.param(
                script,
                check,
                size,
                id=f"{check}-{size}",
                marks=of_tier(size, SIZES[script]),
            )
            for script, items in CHECKS.items()
            for check in items.get(item, ())
            for size in SIZES[script]
        ],
    )


EACH_SIZE = pytest.mark.parametrize(
    "size",
    [pytest.param(size, marks=of_tier(size, EXAMPLE_SIZES)) for size in EXAMPLE_SIZES],
)


@of_item("1")
def test_a1_init(jobs: Mapping[str, Ranks], script: str, check: str, size: int) -> None:
    passed(jobs, script, check, size)


@of_item("2")
def test_a2_ranks(
    jobs: Mapping[str, Ranks], script: str, check: str, size: int
) -> None:
    passed(jobs, script, check, size)


@of_item("4")
def test_a4_allreduce(
    jobs: Mapping[str, Ranks], script: str, check: str, size: int
) -> None:
    passed(jobs, script, check, size)


@of_item("5")
def test_a5_slices(
    jobs: Mapping[str, Ranks], script: str, check: str, size: int
) -> None:
    passed(jobs, script, check, size)


@of_item("6")
def test_a6_allgather(
    jobs: Mapping[str, Ranks], script: str, check: str, size: int
) -> None:
    passed(jobs, script, check, size)


@of_item("7")
def test_a7_mismatches(
    jobs: Mapping[str, Ranks], script: str, check: str, size: int
) -> None:
    passed(jobs, script, check, size)


@of_item("8")
def test_a8_order(
    jobs: Mapping[str, Ranks], script: str, check: str, size: int
) -> None:
    passed(jobs, script, check, size)


@of_item("9")
def test_a9_keeps_its_class(
    jobs: Mapping[str, Ranks], script: str, check: str, size: int
) -> None:
    passed(jobs, script, check, size)


@of_item("10")
def test_a10_trains_alike(
    jobs: Mapping[str, Ranks], script: str, check: str, size: int
) -> None:
    passed(jobs, script, check, size)


@of_item("11")
def test_a11_no_gradient(
    jobs: Mapping[str, Ranks], script: str, check: str, size: int
) -> None:
    passed(jobs, script, check, size)


@of_item("12")
def test_a12_sessions(
    jobs: Mapping[str, Ranks], script: str, check: str, size: int
) -> None:
    passed(jobs, script, check, size)


@of_item("")
def test_operations(
    jobs: Mapping[str, Ranks], script: str, check: str, size: int
) -> None:
    passed(jobs, script, check, size)


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


def test_a9_files_are_loaded_where_there_is_no_tfcluster(
    jobs: Mapping[str, Ranks],
) -> None:
    file = jobs["api_training.py-3"].folder / "by-rank-0.keras"
    done = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE, str(file)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "Adam 2\n"


@EACH_SIZE
def test_a13_every_rank_says_who_it_is(jobs: Mapping[str, Ranks], size: int) -> None:
    ranks = jobs[f"ranks.py-{size}"]
    assert ranks.exit_codes == [0] * size, ranks.outputs
    for rank, output in enumerate(ranks.outputs):
        assert f"rank {rank}, on its host {rank} of {size}" in output
    assert f"there are {size} ranks on 1 hosts" in ranks.outputs[0]


@EACH_SIZE
def test_a13_a_regression_is_the_same_on_any_number_of_ranks(
    jobs: Mapping[str, Ranks], size: int
) -> None:
    ranks = jobs[f"linear_regression.py-{size}"]
    assert ranks.exit_codes == [0] * size, ranks.outputs
    chief, *others = ranks.outputs
    assert "step 200: average loss 0.01" in chief
    assert not any("average loss" in output for output in others)
    found = re.findall(r"average loss (\S+)\nfirst weight (\S+),", chief)
    assert found == [("0.0103", "-0.996")]
