"""When replicas are averaged, and when they count as drifting."""

from __future__ import annotations

import math

import pytest

from tfcluster.runtime.keras.strategies.local_sgd_schedule import Drift, Schedule


@pytest.mark.parametrize(
    ("schedule", "first"),
    [
        (Schedule(), 100),
        (Schedule(every=7), 7),
        # The step rate is not known yet.
        (Schedule(seconds=2.0), 1),
    ],
)
def test_the_first_interval(schedule: Schedule, first: int) -> None:
    assert schedule.interval == first
    assert not schedule.is_due(first - 1)
    assert schedule.is_due(first)


def test_steps_stay_what_they_are() -> None:
    schedule = Schedule(every=7)
    schedule.agreed(schedule.proposal(steps=2, elapsed_s=100.0))
    assert schedule.interval == 7


@pytest.mark.parametrize(
    ("steps", "elapsed_s", "next_interval"),
    [
        (10, 1.0, 20),
        (10, 4.0, 5),
        # At least one step, and at most ten times as many as before.
        (10, 1000.0, 1),
        (10, 0.001, 100),
        (10, 0.0, 100),
        (0, 1.0, 10),
    ],
)
def test_sync_seconds_become_steps_by_the_step_rate(
    steps: int, elapsed_s: float, next_interval: int
) -> None:
    schedule = Schedule(seconds=2.0)
    schedule.agreed(10)
    assert schedule.proposal(steps, elapsed_s) == next_interval


def words(distances: list[float]) -> list[str]:
    drift = Drift()
    found = [drift.saw(distance, 100) for distance in distances]
    return [word for word in found if word is not None]


def test_replicas_that_stay_together_get_no_word() -> None:
    assert words([0.3, 0.2, 0.1, 0.1, 0.1, 0.2, 0.3, 0.29, 0.1, 0.4]) == []
    # The growth does not matter while the replicas are this close to each other.
    assert words([0.0, 0.0, 0.0, 0.0, 0.0, 0.09]) == []


def test_replicas_that_drift_get_one_word_that_says_how_far() -> None:
    (word,) = words([0.02, 0.05, 0.03, 0.03, 0.03, 0.04, 0.19, 0.25, 0.5])
    assert "after 100 steps their parameters were 25.0% away" in word
    assert "at most 5.0% in the beginning" in word
    assert "sync_every" in word


@pytest.mark.parametrize("distance", [math.nan, math.inf])
def test_parameters_that_are_no_numbers_are_reported_at_once(distance: float) -> None:
    (word,) = words([0.1, distance, distance])
    assert "not finite" in word
