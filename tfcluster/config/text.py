"""Text: fits any into one line of a message, and expands references to variables.

``${VAR}`` and ``${VAR:-default}`` are expanded; ``$$`` is one ``$``. No other shell
syntax is supported: no ``$VAR``, no globs, no commands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MAX_PATH = 4096
"""How much of a path a message shows: the maximum on Linux (PATH_MAX)."""


def cut(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def printable(text: str, limit: int = 60) -> str:
    """``text`` cut, with unprintable characters escaped."""
    short = cut(text, limit)
    return short if short.isprintable() else repr(short)[1:-1]


_REFERENCE = re.compile(
    r"\$(?:"
    r"(?P<escape>\$)"
    r"|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^{}]*))?\}"
    r"|(?P<malformed>\{[^}]*\}?)"
    r"|(?P<bare>[A-Za-z_][A-Za-z0-9_]*)"
    r")"
)


class FillError(ValueError):
    """A reference that cannot be expanded; ``reference`` is its text."""

    def __init__(self, message: str, hint: str, reference: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.reference = reference


def fill(text: str, environ: Mapping[str, str], *, keep_bare: bool = False) -> str:
    """``text`` with its references expanded. Raises FillError.

    As in a shell, the default of ``:-`` also replaces a variable that is set but empty.
    ``keep_bare`` leaves ``$VAR`` alone, because the program may be a shell.
    """
    if "$" not in text:
        return text

    def filled(match: re.Match[str]) -> str:
        if match["escape"]:
            return "$"
        if match["bare"] and keep_bare:
            return match[0]
        if not match["name"]:
            raise _refusal(match)
        value = environ.get(match["name"])
        if match["default"] is not None:
            return value or match["default"]
        if value is None:
            name = match["name"]
            hint = f"use ${{{name}:-default}}, or $${{{name}}} for the text itself"
            raise FillError(f"${name} is not set here", hint, match[0])
        return value

    return _REFERENCE.sub(filled, text)


def _refusal(match: re.Match[str]) -> FillError:
    shown = printable(match[0], 40)
    if bare := match["bare"]:
        message = f"{shown} is not expanded: only ${{{bare[:39]}}} is"
        hint = f"write ${{{bare[:39]}}}, or ${shown} for the text itself"
        return FillError(message, hint, match[0])
    message = f"{shown} is not a supported reference"
    hint = "use ${VAR} or ${VAR:-default}; write $$ for one $"
    return FillError(message, hint, match[0])
