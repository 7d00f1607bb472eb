"""A program that reads its rank's loss as if it were the batch's has a warning."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.runtime.ranks import PROGRAMS, Job, Jobs, Ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(120)]

PROGRAM = "own_row_numbers.py"
SLOW = ("printed", "eagerly", "kept")
WAYS = ("converted", "added up", "decides", *SLOW)
READS = "reads a number that"
TEXT = f"{READS} the step at"
NUMBERS = {"added up": -2, "kept": -1, "converted": 0, "decides": 2}
"""Which of the program's marked lines reads, if it is not the second one."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ranks]:
    found = [Job(f"{way} alone", 1, PROGRAM, (way,)) for way in ("otherwise",)]
    found += [Job(way, 2, PROGRAM, (way,)) for way in (*WAYS, "in a step", "otherwise")]
    folder = tmp_path_factory.mktemp("own-row-numbers")
    return Jobs(folder, found, timeout_s=100, must_succeed=True)


def _lines(mark: str) -> list[int]:
    lines = (PROGRAMS / PROGRAM).read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if mark in line]


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=pytest.mark.slow if way in SLOW else ()) for way in WAYS],
)
def test_a_number_of_own_rows_is_pointed_out(
    jobs: Mapping[str, Ranks], way: str
) -> None:
    said = [line for line in jobs[way].outputs[0].splitlines() if TEXT in line]
    reads, (tape,) = _lines("# read"), _lines("tape.gradient(loss")
    assert len(said) == 1
    read = reads[NUMBERS.get(way, 1)]
    assert f"{PROGRAMS / PROGRAM}:{read} {TEXT} {PROGRAMS / PROGRAM}:{tape} " in said[0]


def test_so_is_one_that_an_eager_step_of_a_model_reads(
    jobs: Mapping[str, Ranks],
) -> None:
    said = [line for line in jobs["in a step"].outputs[0].splitlines() if READS in line]
    (line,) = _lines("# step reads")
    assert len(said) == 1
    assert f"{PROGRAM}:{line} {READS} train_step of averaged has computed" in said[0]


def test_what_is_the_batch_s_is_not(jobs: Mapping[str, Ranks]) -> None:
    chief = jobs["otherwise"].outputs[0]
    assert READS not in chief
    # And it is equal.
    numbers = [
        [
            float(word)
            for line in text.splitlines()
            for word in line.split()[-3:]
            if word[:1].isdigit()
        ]
        for text in (chief, jobs["otherwise alone"].outputs[0])
    ]
    assert len(numbers[0]) == 2 * 3 * 4 + 2
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
