"""Makes any text fit into one line of a message."""

from __future__ import annotations

MAX_PATH = 4096
"""How much of a path a message shows: the maximum on Linux (PATH_MAX)."""


def cut(text: str, limit: int = 60) -> str:
    """``text``, or its beginning with an ellipsis if it is too long."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def printable(text: str, limit: int = 60) -> str:
    """``text`` cut, with unprintable characters escaped."""
    short = cut(text, limit)
    return short if short.isprintable() else repr(short)[1:-1]
