"""``runtime.shards``: the weights have the same bits on any number of ranks."""

from __future__ import annotations

import json

import pytest

from tests.kit.ranks import Job, Jobs
from tests.kit.written import Values, Written
from tests.runtime.keras_checks import assert_equal_to_one

pytestmark = [pytest.mark.slow, pytest.mark.tensorflow, pytest.mark.timeout(900)]

SHARDS = 4
SOME = (
    *("fit", "loop", "clips", "masked_loss", "accumulates", "layer_that_draws"),
    *("half_precision", "attention"),
)
MORE = (
    *("own_step", "eagerly", "adversaries", "on_batch", "loop_with_noise", "stateful"),
    *("own_loss", "sharp", "loop_of_adversaries", "undivided_loop"),
    *("scaled_by_the_loss", "kept_loss", "applied_by_its_loss", "step_that_draws"),
    *("built_by_its_first_step", "loop_that_sums", "loop_of_similarities"),
    *("loop_with_the_largest", "loop_that_counts", "loss_that_sums"),
    *("loss_of_the_batch", "drawn_with_a_state", "kept_by_a_layer", "synchronized"),
    *("images", "tape_around_a_function"),
)
TOLERANCE = {"half_precision": 2e-2}
"""Where it is not 1e-4, relative to an array's largest value."""
GROUPS = {"some": SOME, "more": MORE}
MARKS = {"some": [], "more": [pytest.mark.exhaustive]}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("shards")

    def job(name: str, size: int, shards: int | None, *cases: str) -> Job:
        env = {"TFCLUSTER_STRATEGY": "collective"}
        if shards is not None:
            env["TFCLUSTER_RUNTIME"] = json.dumps({"shards": shards})
            env["TFCLUSTER_PARTITION"] = "strict"
        arguments = (str(folder / name), *cases)
        return Job(name, size, "shards.py", arguments, env)

    jobs = [
        *(job(f"{name}-plain", 1, None, *cases) for name, cases in GROUPS.items()),
        *(
            job(f"{name}-{size}", size, SHARDS, *cases)
            for name, cases in GROUPS.items()
            for size in (1, 2, 3, 4)
        ),
        *(job(f"tiny-{size}", size, 8, "tiny") for size in (1, 6, 8)),
    ]
    return Written(folder, Jobs(folder, jobs, timeout_s=800))


def assert_same_bits(one: Values, other: Values) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert value.tobytes() == other[key].tobytes(), key


CASES = [
    pytest.param(name, case, id=case, marks=MARKS[name])
    for name, cases in GROUPS.items()
    for case in cases
]


@pytest.mark.parametrize(("group", "case"), CASES)
@pytest.mark.parametrize(
    "size",
    [
        2,
        pytest.param(3, marks=pytest.mark.exhaustive),
        pytest.param(4, marks=pytest.mark.exhaustive),
    ],
)
def test_the_bits_are_those_of_one_rank(
    found: Written, group: str, case: str, size: int
) -> None:
    (alone,) = found.of(f"{group}-1", case)
    for rank in found.of(f"{group}-{size}", case):
        assert_same_bits(rank, alone)


@pytest.mark.parametrize(("group", "case"), CASES)
def test_it_trains_what_a_program_without_shards_trains(
    found: Written, group: str, case: str
) -> None:
    (plain,) = found.of(f"{group}-plain", case)
    (alone,) = found.of(f"{group}-1", case)
    assert_equal_to_one(plain, alone, tolerance=TOLERANCE.get(case, 1e-4))


@pytest.mark.parametrize(
    "size",
    [
        6,
        pytest.param(8, marks=pytest.mark.exhaustive),
    ],
)
def test_many_ranks_have_the_same_bits(found: Written, size: int) -> None:
    (alone,) = found.of("tiny-1", "tiny")
    for rank in found.of(f"tiny-{size}", "tiny"):
        assert_same_bits(rank, alone)
