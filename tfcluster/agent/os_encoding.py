"""Converts texts of frames to bytes and paths of this host. Pure."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from pathlib import Path


def raw(text: str) -> bytes:
    """A text of a frame as bytes; works for any text.

    Not os.fsencode: the launcher's text is UTF-8, whatever this host's locale is.
    """
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a surrogate pair stands for no byte
        return text.encode("utf-8", "surrogatepass")


def local_name(text: str) -> str:
    """A path in a frame, for functions of ``os``."""
    return os.fsdecode(raw(text))


def local_path(text: str) -> Path:
    """A path in a frame, as a Path. Importing pathlib delays the agent's start."""
    from pathlib import Path

    return Path(local_name(text))
