"""Copies a program's folder, so that a trial cannot change the original."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from tfcluster.errors import ConfigError, Problem, ResourceError
from tfcluster.verify.scratch import PREFIX

MOST_BYTES = 2 << 30
MOST_FILES = 50_000
_SKIPPED = {
    ".git",
    ".hg",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".svn",
    ".tox",
    "__pycache__",
    "node_modules",
}


def require_small(folder: Path) -> None:
    """Raise ConfigError if ``folder`` has more than MOST_BYTES or MOST_FILES."""
    total = 0
    for count, file in enumerate(files_below(folder), 1):
        total += file.lstat().st_size
        if total > MOST_BYTES or count > MOST_FILES:
            raise ConfigError(
                [
                    Problem(
                        str(folder),
                        f"is larger than {MOST_BYTES >> 30} GiB or {MOST_FILES:,} "
                        "files, and `verify` runs the program in copies of its folder",
                        "keep the data in another folder, or run the program in its "
                        "own folder: --in-place",
                    )
                ]
            )


def copy(folder: Path, to: Path) -> None:
    """Copy ``folder`` with its links, without environments and caches.

    Raises ResourceError if a file cannot be read, or the disk is full.
    """
    try:
        shutil.copytree(folder, to, symlinks=True, ignore=_skipped)
    except shutil.Error as error:
        for source, _, why in error.args[0]:
            # A file that is gone by now was not the program's, which has not begun.
            if os.path.lexists(source):
                raise _not_copied(Path(source), why) from error
    except OSError as error:
        raise _not_copied(folder, str(error.strerror)) from error


def _not_copied(source: Path, why: str) -> ResourceError:
    hint = "--in-place runs the program in its own folder; TMPDIR is for the copies"
    return ResourceError(f"cannot copy {source}: {why}", hint=hint)


def files_below(folder: Path) -> Iterator[Path]:
    """The files that are copied; links count as files."""
    for root, folders, files in os.walk(folder):
        skipped = _skipped(root, [*folders, *files])
        folders[:] = [name for name in folders if name not in skipped]
        for name in files:
            if name not in skipped:
                yield Path(root, name)


def _skipped(root: str, names: list[str]) -> set[str]:
    """Names to leave out: caches, virtual environments, sockets, pipes and devices."""
    return {
        name
        for name in names
        if name in _SKIPPED or name.startswith(PREFIX) or _special(Path(root, name))
    }


def _special(path: Path) -> bool:
    if path.is_symlink() or path.is_file():
        return False
    return not path.is_dir() or (path / "pyvenv.cfg").exists()
