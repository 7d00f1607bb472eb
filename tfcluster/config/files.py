"""Reads the configuration file, and checks paths on this host.

The file must be a regular one that we own, of bounded size, in UTF-8. The only module
of this package that opens a file.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path

from tfcluster.config.diagnostics import Report
from tfcluster.config.tree import MAX_PATH, Mark, printable

MAX_BYTES = 1 << 20

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def read_file(path: str, report: Report) -> str:
    mark = Mark(report.source)

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)  # opening a pipe must not block

    try:
        with open(path, "rb", opener=opener) as file:
            _check(os.fstat(file.fileno()), mark, report)
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise report.failed(mark, f"cannot read: {why}") from error
    if len(data) > MAX_BYTES:
        raise report.failed(mark, f"larger than {MAX_BYTES} bytes")
    return _decoded(data, mark, report)


def _check(status: os.stat_result, mark: Mark, report: Report) -> None:
    mode = status.st_mode
    if not stat.S_ISREG(mode):
        kinds = (words for test, words in _KINDS if test(mode))
        why = f"is {next(kinds, 'not a plain file')}"
        raise report.failed(mark, f"cannot read: {why}")
    if mode & stat.S_IWOTH:
        message = f"writable by others ({stat.S_IMODE(mode):04o})"
        report.error(mark, message, f"chmod o-w {shlex.quote(mark.source)}")
    if status.st_uid not in (0, os.geteuid()):
        message = f"belongs to another user (uid {status.st_uid})"
        report.error(mark, message, "its commands would run as you; copy it")


def _decoded(data: bytes, mark: Mark, report: Report) -> str:
    if data.startswith(_UTF16):
        raise report.failed(
            mark._replace(line=1, column=1), "is UTF-16", "save it as UTF-8"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # `utf-8-sig` does not count a byte order mark.
        start = error.start + (3 if data.startswith(b"\xef\xbb\xbf") else 0)
        before = data[:start]
        line_start = before.rfind(b"\n") + 1
        column = len(before[line_start:].decode("utf-8", "replace")) + 1
        place = mark._replace(line=before.count(b"\n") + 1, column=column)
        message = f"byte 0x{data[start]:02x} is not UTF-8"
        hint = "a Latin-1 file? save it as UTF-8"
        raise report.failed(place, message, hint) from error


class PathError(ValueError):
    """A path that cannot be made absolute."""


def absolute(text: str, folder: Path, environ: Mapping[str, str]) -> Path:
    """``text`` relative to ``folder`` or ``~/``, links unresolved. Raises PathError."""
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
    """Why the file must not hold a secret, and a hint; None: it may, or is missing."""
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
