"""Losses that are not a mean over the rows of a batch, and only those, are named.

The cases are those of ``programs/cases/row_terms.py``, which run with ``on_difference:
warn``. By default the program ends: see ``test_keras_refused.py``.
"""

from __future__ import annotations

import re

import pytest

from tests.runtime.keras_checks import MARKS, assert_not_refused
from tests.runtime.keras_jobs import Outcomes, cases_of, in_tiers
from tests.runtime.ranks import PROGRAMS

pytestmark = MARKS

THEME = "row_terms"
PROGRAM = PROGRAMS / "cases" / f"{THEME}.py"
TEXT = "is not a mean over the rows of a batch"
BY_PLACE = "depends on where in the batch a row is"
SCALED = "is scaled by a number of the batch without gradient"
REPORTED = "is neither a mean nor a sum over the rows of a batch"
CASES = cases_of(THEME)
REPORTS = [case for case in CASES if case.startswith("reported_")]


@pytest.mark.parametrize(
    "case", in_tiers([case for case in CASES if case not in REPORTS])
)
def test_losses_whose_rows_share_something_are_pointed_out(
    outcomes: Outcomes, case: str
) -> None:
    assert_not_refused(outcomes.refused(case))
    said = outcomes.said(case)
    if case.startswith("no_"):
        assert not any(text in said for text in (TEXT, BY_PLACE, SCALED, REPORTED))
        return
    text = BY_PLACE if "halves" in case else SCALED if "detached" in case else TEXT
    assert said.count(text) == 1
    named = re.search(rf"row_terms\.py:(\d+): this loss {text}", said)
    assert named
    line = PROGRAM.read_text().splitlines()[int(named[1]) - 1]
    by_keras = case.startswith(("computed_", "layer"))
    where = ".fit(" if by_keras else "tape.gradient("
    assert where in line


@pytest.mark.parametrize("case", in_tiers(REPORTS))
def test_numbers_for_metrics_that_share_something_are_pointed_out(
    outcomes: Outcomes, case: str
) -> None:
    assert_not_refused(outcomes.refused(case))
    said = outcomes.said(case)
    what = r"the number that the metric ([a-z]+)_\w+ gets"
    if "in_logs" in case:
        what = r"([a-z]+)_\w+ in the logs of a step"
    warned = re.findall(rf"row_terms\.py:(\d+): {what} {REPORTED}", said)
    assert {name for _, name in warned} == {"deviation", "precision"}
    assert said.count(REPORTED) == len(warned)
    if "in_logs" in case:
        return
    lines = PROGRAM.read_text().splitlines()
    assert all(f'"{name}"].update_state(' in lines[int(n) - 1] for n, name in warned)
