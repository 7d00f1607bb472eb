"""Durations as people write them, ``500ms``, ``10s``, ``7d``, and Slurm's times."""

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
    for unit, unit_s in reversed(SECONDS.items()):
        if seconds >= unit_s and seconds % unit_s == 0:
            return f"{seconds / unit_s:.0f}{unit}"
    return f"{seconds:g}s"


_MAX_TIME = 100
"""The limit in characters: a longer text is not a time."""


def time_limit_s(time: str) -> int | None:
    """Parse a time: ``90`` (minutes), ``H:MM:SS``, ``D-HH``; None: unlimited."""
    if len(time) > _MAX_TIME:
        return None
    days, dash, rest = time.rpartition("-")
    words = rest.split(":")
    if not all(word.isdecimal() for word in words):
        return None
    numbers = [int(word) for word in words]
    if dash:
        hours, minutes, rest_s = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, rest_s = numbers
    else:
        hours, (minutes, rest_s) = 0, (*numbers, 0)[:2]
    whole = int(days) if days.isdecimal() else 0
    return ((whole * 24 + hours) * 60 + minutes) * 60 + rest_s


def clock(seconds: int) -> str:
    """``HH:MM:SS``; hours may exceed 24."""
    minutes, rest = divmod(seconds, 60)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest:02}"
