"""Random numbers that a loop draws outside of TensorFlow for its rows are found."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from tests.runtime.ranks import PROGRAMS, Job, Jobs, Ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(150)]

PROGRAM = "program_arrays.py"
TEXT = "its numbers do not depend on these rows"
REFUSED = ("function", "constant", "eagerly", "fit")
SLOW = ("constant", "fit")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ranks]:
    found = [Job(way, 2, PROGRAM, (way,)) for way in (*REFUSED, "alike")]
    found += [
        Job("alone", 1, PROGRAM, ("alike",)),
        Job("on three", 3, PROGRAM, ("function",)),
    ]
    return Jobs(tmp_path_factory.mktemp("arrays"), found, timeout_s=120)


def _line() -> int:
    lines = (PROGRAMS / PROGRAM).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if "# gets" in line)


@pytest.mark.parametrize(
    "way",
    [
        *(
            pytest.param(way, marks=pytest.mark.slow if way in SLOW else ())
            for way in REFUSED
        ),
        pytest.param("on three", marks=pytest.mark.slow),
    ],
)
def test_drawn_numbers_are_refused(jobs: Mapping[str, Ranks], way: str) -> None:
    ended = jobs[way]
    assert set(ended.exit_codes) == {1}
    for output in ended.outputs:
        error = [one for one in output.splitlines() if "CollectiveError: " in one][-1]
        assert TEXT in error
        assert way in ("eagerly", "fit") or f"{PROGRAM}:{_line()}: this call" in error


def test_others_are_not(jobs: Mapping[str, Ranks]) -> None:
    (alone,) = jobs["alone"].outputs
    for output in jobs["alike"].outputs:
        assert TEXT not in output
        np.testing.assert_allclose(_weights(output), _weights(alone), atol=1e-5)


def _weights(output: str) -> list[float]:
    (line,) = [each for each in output.splitlines() if each.startswith("weights ")]
    return [float(word) for word in line.split()[1:]]
