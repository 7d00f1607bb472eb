"""Ranks whose models have diverged get an error, at the end at the latest."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from tests.kit.ranks import Job, Jobs, Ranks

pytestmark = [pytest.mark.tensorflow, pytest.mark.timeout(300)]

WHATS = ("ends early", "assigns last", "sets a rate last", "exits", "in a function")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Ranks]:
    jobs = [Job(what, 2, "diverging.py", (what,)) for what in WHATS]
    jobs.append(Job("three end early", 3, "diverging.py", ("ends early",)))
    return Jobs(tmp_path_factory.mktemp("divergence"), jobs, timeout_s=290)


@pytest.mark.parametrize(
    "what", ["ends early", pytest.param("three end early", marks=pytest.mark.slow)]
)
def test_a_rank_that_takes_fewer_steps_is_named(
    jobs: Mapping[str, Ranks], what: str
) -> None:
    *others, early = jobs[what].exit_codes
    assert early == 0, jobs[what].outputs
    assert set(others) == {1}
    for output in jobs[what].outputs[:-1]:
        last = output.strip().splitlines()[-1]
        assert "CollectiveMismatchError: the ranks took different numbers of" in last
        assert f"rank {len(others)} ended its program after step 4, while" in last
        assert "continues after step 4" in last
        assert re.search(r" at \S*diverging\.py:\d+\. Rank", last)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("assigns last", "last/kernel differs between rank"),
        pytest.param(
            "sets a rate last",
            "the adam/learning_rate is 0.1 on rank 0 and 0.05 on",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_differs_at_the_end_is_an_error(
    jobs: Mapping[str, Ranks], what: str, text: str
) -> None:
    """If the ranks do not end at the same moment, the later one gets the error."""
    assert 1 in jobs[what].exit_codes, jobs[what].outputs
    said = "".join(jobs[what].outputs)
    assert text in said
    assert "at the end of the program; it was the same in step" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "what", ["exits", pytest.param("in a function", marks=pytest.mark.slow)]
)
def test_programs_that_end_alike_end_well(jobs: Mapping[str, Ranks], what: str) -> None:
    assert jobs[what].exit_codes == [0, 0], jobs[what].outputs
