"""A tf.Variable of the program that a step sets from one rank's rows is found."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.runtime.ranks import PROGRAMS, Job, Jobs, Ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(150)]

PROGRAM = "program_variables.py"
TEXT = "from the rows of one rank"
REFUSED, WARNED = ("fit", "loop"), ("summed", "eagerly")
NAMES = {"summed": "total"}
PLACES = {"summed": 0, "fit": 1, "loop": 2}
"""Which of the program's marked lines it is, if not the last one."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ranks]:
    found = [Job(way, 2, PROGRAM, (way,)) for way in (*REFUSED, *WARNED, "alike")]
    found.append(Job("alone", 1, PROGRAM, ("alike",)))
    return Jobs(tmp_path_factory.mktemp("own"), found, timeout_s=120)


def _where(way: str) -> str:
    lines = (PROGRAMS / PROGRAM).read_text().splitlines()
    marked = [number for number, line in enumerate(lines, 1) if "# set" in line]
    return f"{PROGRAMS / PROGRAM}:{marked[PLACES.get(way, -1)]} sets"


@pytest.mark.parametrize("way", REFUSED)
def test_one_on_which_the_loss_depends_is_refused(
    jobs: Mapping[str, Ranks], way: str
) -> None:
    ended = jobs[way]
    assert ended.exit_codes == [1, 1]
    for output in ended.outputs:
        error = [one for one in output.splitlines() if "CollectiveError: " in one][-1]
        assert f"{_where(way)} the tf.Variable queue {TEXT}" in error
        assert "A loss depends on it" in error


@pytest.mark.parametrize("way", WARNED)
def test_another_one_has_a_warning(jobs: Mapping[str, Ranks], way: str) -> None:
    ended = jobs[way]
    assert ended.exit_codes == [0, 0], ended.outputs
    said = [line for line in ended.outputs[0].splitlines() if TEXT in line]
    assert len(said) == 1
    name = NAMES.get(way, "queue")
    assert f"warning: {_where(way)} the tf.Variable {name} {TEXT}" in said[0]


def test_what_all_ranks_set_alike_is_not(jobs: Mapping[str, Ranks]) -> None:
    (alone,) = jobs["alone"].outputs
    for output in jobs["alike"].outputs:
        assert TEXT not in output
        for name in ("weights", "queue"):
            one, other = (_numbers(text, name) for text in (output, alone))
            assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


def _numbers(output: str, name: str) -> list[float]:
    (line,) = [line for line in output.splitlines() if line.startswith(f"{name} ")]
    return [float(word) for word in line.split()[1:]]
