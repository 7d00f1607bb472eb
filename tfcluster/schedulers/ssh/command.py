"""Quotes arguments for a login shell; the only place that does so.

Knows nothing about what is executed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_PLAIN = re.compile(rb"[A-Za-z0-9_./:,@%+=-]+")
_PARTS = re.compile(rb"\\|'|!|[^\\'!]+")
_BACKSLASHED = (b"\\", b"'", b"!")
"""Special even between single quotes: ``\\`` in fish, ``!`` in csh."""


def remote_command(argv: Sequence[str]) -> bytes:
    """A line that makes sh, bash, zsh, csh or fish ``exec`` the words of ``argv``.

    Raises ValueError for NUL and newlines, which cannot be quoted for all of them, and
    for a program that would be an option of ``exec``.
    """
    if not argv or argv[0].startswith("-"):
        raise ValueError(f"{argv[:1]!r} names no program")
    return b"exec " + b" ".join(_quoted(os.fsencode(word)) for word in argv)


def _quoted(word: bytes) -> bytes:
    if any(byte in word for byte in (b"\0", b"\n", b"\r")):
        raise ValueError(f"{word!r} cannot be passed through a login shell")
    if _PLAIN.fullmatch(word):
        return word
    if not word:
        return b"''"
    return b"".join(
        b"\\" + part if part in _BACKSLASHED else b"'" + part + b"'"
        for part in _PARTS.findall(word)
    )
