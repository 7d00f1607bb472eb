"""Which of Python's audit events are changes of files by the program, and where.

See ``sys.addaudithook`` and the table of audit events in Python's documentation.
"""

from __future__ import annotations

import os
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import tfcluster

_PATHS: Mapping[str, Sequence[tuple[int, int | None]]] = {
    "open": ((0, None),),
    "os.mkdir": ((0, 2),),
    "os.rmdir": ((0, 1),),
    "os.remove": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    # Before it opens folders, by which it then removes files.
    "shutil.rmtree": ((0, 1),),
    "sqlite3.connect": ((0, None),),
}
"""By event: the positions of a path and of the folder's descriptor that it is for."""
_COMMANDS = frozenset(("os.system", "subprocess.Popen", "os.posix_spawn"))
"""Events of commands, which may change any file."""
EVENTS = frozenset(_PATHS) | _COMMANDS

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NO_FILES = ("/dev", "/proc", "/sys", "/run")
_TEMPORARY = ("tfcluster-", tempfile.gettempprefix())
_OURS = f"{Path(tfcluster.__file__).parent}/"
_STANDARD = f"{sysconfig.get_path('stdlib')}/"
_INSTALLED = ("/site-packages/", "/dist-packages/")
_HELPERS = ("/keras/src/utils/", f"{Path(__file__).parent}/")
"""Functions that change files for others."""
_OF_THE_CHIEF = "/keras/src/callbacks/tensorboard.py"
"""A callback that only the chief has."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a program is about to change, and where it says so.

    ``paths`` are absolute, their folders without links; a command has none.
    """

    paths: tuple[str, ...]
    what: str
    line: str


def change_of(
    event: str, args: tuple[object, ...], frame: FrameType | None, work: str
) -> Change | None:
    """The change that an event announces; None if it is none of the program's.

    ``frame`` is the caller's. Files for one process only do not count, unless they are
    in the program's folder ``work``.
    """
    if event == "open" and not _writes(args[0], args[2]):
        return None
    paths: tuple[str, ...] = ()
    if event in _PATHS:
        absolute = [_absolute(args, *places) for places in _PATHS[event]]
        paths = tuple(path for path in absolute if path and is_shared(path, work))
        if not paths:
            return None
    if _caller(frame) is None:
        return None
    what = Path(paths[-1]).name if paths else _shown(args)
    return Change(paths, what, program_line(frame) or "")


def _writes(path: object, flags: object) -> bool:
    """Whether a file is opened for changes.

    Python opens a folder so, with an opener of its own, for a temporary file in it;
    another event announces that file.
    """
    if not isinstance(flags, int) or not flags & _WRITES:
        return False
    return not isinstance(path, str | bytes | os.PathLike) or not os.path.isdir(path)  # noqa: PTH112 - fast


def _shown(command: tuple[object, ...]) -> str:
    first = command[0]
    return os.fsdecode(first) if isinstance(first, str | bytes) else str(first)


def _absolute(args: tuple[object, ...], at: int, folder_at: int | None) -> str | None:
    path = args[at]
    if not isinstance(path, str | bytes | os.PathLike):
        return None  # a descriptor
    folder = args[folder_at] if folder_at is not None else None
    text = os.fsdecode(path)
    if isinstance(folder, int) and folder >= 0:
        text = f"/proc/self/fd/{folder}/{text}"
    elif text.startswith((":", "file:")):
        return None  # a database in memory, or a URL
    head, tail = os.path.split(text.rstrip("/"))
    try:
        return os.path.normpath(f"{os.path.realpath(head)}/{tail}")
    except OSError:
        return None


def temporary_folder() -> str:
    """The folder for temporary files.

    Not from ``tempfile``, which would call the audit hook while it holds a lock, and
    would ignore variables that the program sets later.
    """
    folders = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    return tempfile.tempdir or next(filter(None, folders), "/tmp")


def is_shared(path: str, work: str) -> bool:
    """Whether other ranks may use the same path."""
    if "/__pycache__/" in path or path.startswith(tuple(f"{f}/" for f in _NO_FILES)):
        return False
    if path.startswith(f"{work}/"):
        return True
    temporary = os.path.realpath(temporary_folder())
    return not path.startswith(tuple(f"{temporary}/{name}" for name in _TEMPORARY))


def _caller(frame: FrameType | None) -> FrameType | None:
    """Who causes a change: the innermost function that is not there to be used so.

    None for a change by the runtime, or on the chief only.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        is_helper = _is_standard(file) or any(part in file for part in _HELPERS)
        if not is_helper:
            is_ours = file.startswith(_OURS) or file.endswith(_OF_THE_CHIEF)
            return None if is_ours else frame
        if frame.f_back is None:
            return frame
        frame = frame.f_back
    return None


def program_line(frame: FrameType | None) -> str | None:
    """The innermost line of the program; None if there is only library code."""
    while frame is not None:
        file = frame.f_code.co_filename
        is_library = file.startswith(_OURS) or any(part in file for part in _INSTALLED)
        if not is_library and not _is_standard(file):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def _is_standard(file: str) -> bool:
    if any(part in file for part in _INSTALLED):
        return False
    return file.startswith(("<frozen", _STANDARD))
