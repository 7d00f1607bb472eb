"""Durations as people write them: ``500ms``, ``10s``, ``5m``, ``1h``, ``7d``. Pure."""

from __future__ import annotations

import re

PATTERN = r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)"
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(text: str) -> float | None:
    """The seconds in ``text``; None if it is not a number with a unit."""
    match = re.fullmatch(PATTERN, text)
    return float(match[1]) * SECONDS[match[2]] if match else None


def duration_text(seconds: float) -> str:
    """``seconds`` in the largest unit that needs no fraction, or else in seconds."""
    for unit, each in reversed(SECONDS.items()):
        if seconds >= each and seconds % each == 0:
            return f"{seconds / each:.0f}{unit}"
    return f"{seconds:g}s"
