"""Makes paths in the configuration absolute, and checks those on this host.

Only calls ``stat``; never opens a file.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path

from tfcluster.config.text import MAX_PATH, printable


class PathError(ValueError):
    """A path that cannot be made absolute."""


def absolute(text: str, folder: Path, environ: Mapping[str, str]) -> Path:
    """``text`` relative to ``folder``, with a leading ``~/`` expanded.

    Links are not resolved: the path may be on other hosts. Raises PathError.
    """
    if text == "~" or text.startswith("~/"):
        home = environ.get("HOME")
        if not home:
            raise PathError("'~' cannot be expanded: HOME is not set")
        text = home + text[1:]
    elif text.startswith("~"):
        raise PathError("'~user' is not expanded; write the path")
    return Path(os.path.normpath(folder / text))


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (OSError, ValueError):
        return None


def folder_problem(path: Path) -> str | None:
    """Why tasks on this host must not run in ``path``, or None."""
    status = _status(path)
    if status is None:
        return f"{str(path)!r} does not exist"
    if not stat.S_ISDIR(status.st_mode):
        return f"{str(path)!r} is not a folder"
    above = _status(path.parent)
    # In a folder like /tmp, anyone may have created it as a trap.
    shared = above is not None and above.st_mode & stat.S_IWOTH
    if shared and status.st_uid not in (0, os.geteuid()):
        owner = f"belongs to uid {status.st_uid}"
        return f"{str(path)!r} {owner}, in a folder open to everyone"
    return None


def exists(path: Path) -> bool:
    return _status(path) is not None


def secret_problem(path: Path) -> tuple[str, str | None] | None:
    """Why the file must not hold a secret (message, hint); None if it may, or is
    missing."""
    status = _status(path)
    if status is None:
        return None
    if not stat.S_ISREG(status.st_mode):
        return f"{str(path)!r} is not a plain file", None
    if status.st_uid != os.geteuid():
        return f"{str(path)!r} belongs to uid {status.st_uid}, not to you", None
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        hint = f"chmod 600 {printable(shlex.quote(str(path)), MAX_PATH)}"
        return f"{str(path)!r} is open to others ({mode:04o})", hint
    return None
