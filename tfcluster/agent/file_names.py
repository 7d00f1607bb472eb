"""Names of files: as texts of frames, as bytes of this host, and in patterns. Pure.

Launcher and agent use the same patterns, so that both agree on which files are meant.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Sequence

from tfcluster.protocol.frames import ProtocolError

TYPE_CHECKING = False  # as in typing, which takes long to import
if TYPE_CHECKING:
    from pathlib import Path


def raw(text: str) -> bytes:
    """Any text of a frame as bytes: UTF-8, unlike os.fsencode in some locales."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # half a surrogate pair stands for no byte
        return text.encode("utf-8", "surrogatepass")


def local_name(text: str) -> str:
    return os.fsdecode(raw(text))


def local_path(text: str) -> Path:
    """A path in a frame, as a Path. Importing pathlib delays the agent's start."""
    from pathlib import Path

    return Path(local_name(text))


NEVER = (
    *(".git", ".hg", ".svn", "__pycache__", "*.pyc", "node_modules"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints"),
    ".tfcluster-*",
)
"""Names that are never copied in either direction."""
BY_HOST = "results-by-host"
"""The folder in which the results of several hosts are kept, in one folder per host."""
RESULT_FILES = 10_000
"""The largest number of files in a listing of results."""
RESULT_PIECE_BYTES = 64 << 10
"""Pieces are small, so that a slow line still passes some frame every few seconds: a
host that sends no complete frame counts as silent."""
ENVIRONMENT = "pyvenv.cfg"
"""Marks a virtual environment, which is of no use on another host."""


def is_excluded(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches: the path if it has a slash, else the name."""
    name = path.rpartition("/")[2]
    for pattern in patterns:
        bare = pattern.removesuffix("/")
        if fnmatch.fnmatchcase(path if "/" in bare else name, bare.removeprefix("/")):
            return True
    return False


def is_wanted(path: str, patterns: Sequence[str]) -> bool:
    """Whether the path or a folder above it matches; ``x/`` matches only folders."""
    if is_excluded(path, [p for p in patterns if not p.endswith("/")]):
        return True
    folder = path.rpartition("/")[0]
    while folder:
        if is_excluded(folder, patterns):
            return True
        folder = folder.rpartition("/")[0]
    return False


def is_never(path: str) -> bool:
    """Whether the file or a folder that contains it is never copied."""
    return any(is_excluded(part, NEVER) for part in path.split("/"))


def is_inside(path: str) -> bool:
    """Whether a path from outside is normalized and stays below the folder."""
    parts = path.split("/")
    return "\0" not in path and not any(part in ("", ".", "..") for part in parts)


def check_inside(path: str) -> None:
    """Raise ProtocolError unless ``path`` can be a file below a folder."""
    if not is_inside(path):
        raise ProtocolError(f"{path!r} is not a path within a folder")
    try:
        path.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ProtocolError(f"{path!r} cannot be the name of a file") from error
