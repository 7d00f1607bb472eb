"""Times of hosts' clocks are placed on the launcher's clock."""

from __future__ import annotations

from typing import Any

from tfcluster.launcher.host_facts import Measured
from tfcluster.trace.spans import host_clocks


def _event(monotonic_s: float, offset_s: float, uncertainty_s: float) -> dict[str, Any]:
    return {
        "type": "clock",
        "host": "h1",
        "monotonic_s": monotonic_s,
        "offset_s": offset_s,
        "uncertainty_s": uncertainty_s,
    }


def test_the_middle_between_asking_and_hearing_counts() -> None:
    measured = Measured.of(monotonic_s=7.0, asked_s=1000.0, heard_s=1000.5)
    assert measured == Measured(7.0, 993.25, 0.25)


def test_what_is_worth_recording() -> None:
    last = Measured(7.0, 993.0, 0.010)
    assert last.says_more_than(None)
    assert not Measured(12.0, 993.005, 0.009).says_more_than(last)
    assert Measured(12.0, 993.005, 0.004).says_more_than(last)
    assert Measured(12.0, 993.03, 0.010).says_more_than(last)
    sure = Measured(7.0, 993.0, 0.0001)
    assert not Measured(12.0, 993.0005, 0.0001).says_more_than(sure)


def test_between_two_measurements_the_clocks_drift_evenly() -> None:
    clock = host_clocks([_event(10.0, 100.0, 0.001), _event(20.0, 100.5, 0.001)])["h1"]
    assert clock.ours_us(5_000_000) == 105_000_000
    assert clock.ours_us(10_000_000) == 110_000_000
    assert clock.ours_us(14_000_000) == 114_200_000
    assert clock.ours_us(20_000_000) == 120_500_000
    assert clock.ours_us(30_000_000) == 130_500_000
    assert clock.uncertainty_s == 0.001


def test_a_measurement_that_took_long_is_not_used() -> None:
    clock = host_clocks([_event(10.0, 107.0, 8.0), _event(20.0, 100.0, 0.01)])["h1"]
    assert clock.ours_us(10_000_000) == 110_000_000
    assert clock.uncertainty_s == 0.01


def test_wrong_events_are_left_out() -> None:
    wrong = {**_event(1.0, 1.0, 1.0), "offset_s": "x"}
    assert host_clocks([wrong, {"type": "note"}, _event(1.0, 2.0, 0.1)]).keys() == {
        "h1"
    }
