"""Makes any text fit for one line of a message."""

from __future__ import annotations

MAX_PATH = 4096
"""Characters of a path that a message shows: all that Linux allows."""


def cut(text: str, limit: int = 60) -> str:
    """``text``, or its beginning with dots."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def printable(text: str, limit: int = 60) -> str:
    """``text`` cut, and with escapes for what a terminal would not show as it is."""
    short = cut(text, limit)
    return short if short.isprintable() else repr(short)[1:-1]
