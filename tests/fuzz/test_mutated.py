"""Mutated inputs for each parser: a few of them, or as many as ``make fuzz`` asks for.

hypothesis shrinks an input that is a defect, prints it, and tries it again next time.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.strategies import mutated
from tests.fuzz.targets import targets
from tests.fuzz.trial import attempt

_EXAMPLES = int(os.environ.get("TFCLUSTER_FUZZ_EXAMPLES", "15"))
_MOST_BYTES = 1 << 12


@pytest.mark.parametrize("name", targets())
def test_valid_inputs_are_accepted(name: str) -> None:
    outcomes = [attempt(targets()[name], seed) for seed in targets()[name].seeds()]
    assert [outcome.defect for outcome in outcomes if outcome.defect] == []
    if name not in ("accept", "dial"):  # nobody can know the token
        assert not all(outcome.refused for outcome in outcomes)


@pytest.mark.parametrize("name", targets())
@settings(
    max_examples=_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_mutated_inputs_are_no_surprise(name: str, data: st.DataObject) -> None:
    target = targets()[name]
    most_bytes = (
        min(target.most_bytes, _MOST_BYTES) if _EXAMPLES < 1000 else target.most_bytes
    )
    changed = data.draw(mutated(target.seeds(), target.words, most_bytes))
    outcome = attempt(target, changed)
    assert outcome.defect is None, (outcome.defect, changed)
