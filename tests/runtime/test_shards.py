"""``runtime.shards``: the weights have the same bits on any number of ranks."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.runtime.keras_checks import assert_equal_to_one
from tests.runtime.ranks import Job, Jobs
from tests.runtime.written import Values, Written

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(900)]

SHARDS = 4
SIZES = (
    2,
    pytest.param(4, marks=pytest.mark.exhaustive),
    pytest.param(3, marks=pytest.mark.exhaustive),
)
TRAINED = ("fit", "own_step", "own_loss", "eagerly")
WITH_MORE = (
    "clips",
    "accumulates",
    "adversaries",
    "sharp",
    "on_batch",
    "loop",
    "loop_of_adversaries",
    "loop_with_noise",
    "undivided_loop",
)
REFUSED = {
    "scaled_by_the_loss": "is changed by a number that depends on the rows",
    "kept_loss": "sets",
    "counted_rows": "sets",
    "applied_by_its_loss": "within a conditional",
    "loop_that_sums": "grow with the number of rows in a batch",
    "loop_of_similarities": "this loss is not a mean over the rows",
    "loop_that_adds_up": "is a sum over the rows of a batch",
    "loop_with_the_largest": "this function returns is not a mean over the rows",
    "loop_that_counts": "that depends on the rows of the batch",
    "step_that_draws": "draws random numbers of Python or numpy",
    "layer_that_draws": "draws random numbers of Python or numpy",
    "loop_that_draws": "draws random numbers of Python or numpy",
    "step_that_sums": "grow with the number of rows in a batch",
    "eager_step": "cannot run eagerly",
    "loss_that_sums": "sum_of_squares returns the sum over the rows of a batch",
    "loss_of_the_batch": "spread is not a mean over the rows of a batch",
    "loss_of_single_rows": "a batch needs 8",
    "masked_loss": "divides by the number of its unmasked entries",
    "stateful": "is stateful",
    "drawn_with_a_state": "from a state that TensorFlow keeps",
    "kept_by_a_layer": "the program's own layer seen sets",
    "synchronized": "has synchronized=True",
}
MODELS = "cases/models.py"
FIRST_STEP = "built_by_its_first_step"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("shards")

    def job(
        name: str, size: int, shards: int, *cases: str, script: str = "shards.py"
    ) -> Job:
        env = {
            "TFCLUSTER_STRATEGY": "collective",
            "TFCLUSTER_RUNTIME": json.dumps({"shards": shards}),
        }
        return Job(name, size, script, (str(folder / name), *cases), env)

    jobs = [
        *(
            job(f"{case}-{size}", size, SHARDS, case)
            for case in TRAINED
            for size in (1, 2, 3, 4)
        ),
        *(
            job(f"{case}-{size}", size, SHARDS, case)
            for case in WITH_MORE
            for size in (1, 2, 3)
        ),
        *(job(f"tiny-{size}", size, 8, "tiny") for size in (1, 6, 8)),
        Job("positions-1", 1, MODELS, (str(folder / "positions-1"), "positions")),
        job("positions-2", 2, SHARDS, "positions", script=MODELS),
        job("refused", 1, SHARDS, *REFUSED, "wide_matrix", FIRST_STEP),
    ]
    return Written(folder, Jobs(folder, jobs, timeout_s=800))


def assert_same_bits(one: Values, other: Values, *, beside: str = "history_") -> None:
    compared = [key for key in one if not key.startswith(beside)]
    assert compared
    for key in compared:
        assert one[key].tobytes() == other[key].tobytes(), key


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow][: case != "fit"]) for case in TRAINED],
)
@pytest.mark.parametrize("size", SIZES)
def test_the_bits_are_those_of_one_rank(found: Written, case: str, size: int) -> None:
    (alone,) = found.of(f"{case}-1", case)
    for rank in found.of(f"{case}-{size}", case):
        assert_same_bits(rank, alone)
        for key in alone:
            np.testing.assert_allclose(rank[key], alone[key], rtol=1e-5, err_msg=key)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.exhaustive][: "adversaries" in case])
        for case in WITH_MORE
    ],
)
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(2, marks=pytest.mark.exhaustive),
    ],
)
def test_steps_and_loops_of_the_program_have_the_same_bits(
    found: Written, case: str, size: int
) -> None:
    (alone,) = found.of(f"{case}-1", case)
    for rank in found.of(f"{case}-{size}", case):
        assert_same_bits(rank, alone)


@pytest.mark.slow
def test_slices_of_positions_are_added_up_as_on_one_machine(found: Written) -> None:
    (plain,) = found.of("positions-1", "positions")
    for rank in found.of("positions-2", "positions"):
        assert_equal_to_one(plain, rank)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(6, marks=pytest.mark.slow),
        pytest.param(8, marks=pytest.mark.exhaustive),
    ],
)
def test_many_ranks_have_the_same_bits(found: Written, size: int) -> None:
    (alone,) = found.of("tiny-1", "tiny")
    for rank in found.of(f"tiny-{size}", "tiny"):
        assert_same_bits(rank, alone)


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_a_step_that_needs_more_than_a_shard_is_refused(
    found: Written, case: str
) -> None:
    (values,) = found.of("refused", case)
    assert REFUSED[case] in str(values["raised"])


@pytest.mark.slow
def test_gradients_of_wide_matrices_do_not_copy_them(found: Written) -> None:
    (values,) = found.of("refused", "wide_matrix")
    assert values["largest_error"] < 2e-6
    assert values["copies"] == values["conditionals"] == 0


@pytest.mark.slow
def test_a_first_step_may_draw_seeds(found: Written) -> None:
    (values,) = found.of("refused", FIRST_STEP)
    assert str(values["raised"]) == "nothing"
