"""Time limits as Slurm and people write them. Pure."""

from __future__ import annotations

_MAX_TIME = 100
"""The limit in characters: a longer text is not a time."""


def seconds(time: str) -> int | None:
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
