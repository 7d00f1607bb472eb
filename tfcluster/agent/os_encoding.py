"""Texts of frames as this host's bytes and paths. Pure."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # as typing has it, which takes long to import
if TYPE_CHECKING:
    from pathlib import Path


def raw(text: str) -> bytes:
    """The bytes that a text stands for. Not os.fsencode: the launcher's text is UTF-8,
    whatever this host's locale is. Any text of a frame has such bytes."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a surrogate pair, which stands for no byte
        return text.encode("utf-8", "surrogatepass")


def local_name(text: str) -> str:
    """The same for a path, as functions of ``os`` take it."""
    return os.fsdecode(raw(text))


def local_path(text: str) -> Path:
    """The same as a Path, where a longer start of the agent does not matter."""
    from pathlib import Path

    return Path(local_name(text))
