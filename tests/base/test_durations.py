"""Tests of durations as people write them."""

from __future__ import annotations

import pytest

from tfcluster.base.durations import duration_text, parse_duration


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3600.0, "1h"),
        (5400.0, "90m"),
        (86400.0, "1d"),
        (5.0, "5s"),
        (2.5, "2.5s"),
        (0.0004, "0.0004s"),
        (0.0, "0s"),
    ],
)
def test_a_duration_is_written_as_it_is_read(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text
    assert parse_duration(text) == seconds
