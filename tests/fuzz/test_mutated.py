"""A few mutated inputs for each parser; ``make fuzz`` tries many more."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.mutate import mutated
from tests.fuzz.targets import targets
from tests.fuzz.trial import attempt

_MOST_BYTES = 1 << 12


@pytest.mark.parametrize("name", targets())
def test_valid_inputs_are_accepted(name: str) -> None:
    outcomes = [attempt(targets()[name], seed) for seed in targets()[name].seeds()]
    assert [outcome.defect for outcome in outcomes if outcome.defect] == []
    if name not in ("accept", "dial"):  # nobody can know the token
        assert not all(outcome.refused for outcome in outcomes)


@pytest.mark.parametrize("name", targets())
@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(st.integers(0, 2**32), st.binary(max_size=30))
def test_mutated_inputs_are_no_surprise(name: str, seed: int, data: bytes) -> None:
    target = targets()[name]
    random = Random(seed)
    seeds = target.seeds()
    for known in (random.choice(seeds), random.choice(seeds), data):
        changed = mutated(
            random, known, others=seeds, words=target.words, most_bytes=_MOST_BYTES
        )
        outcome = attempt(target, changed)
        assert outcome.defect is None, (outcome.defect, changed)
