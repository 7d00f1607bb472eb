"""Identifies the packages that requirements ask for, including those in local files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from tfcluster.model import Requirements

_SOURCES = (
    *(".py", ".pyi", ".pyx", ".toml", ".cfg", ".in", ".txt"),
    *(".c", ".cc", ".cpp", ".cu", ".h"),
)
_ARCHIVES = (".whl", ".zip", ".gz", ".bz2")
_COMPILED = (".pyx", ".c", ".cc", ".cpp", ".cu", ".h")
_SETTINGS = ("pyproject.toml", "setup.py", "setup.cfg")
_SKIPPED = {"__pycache__", "build", "node_modules"}
_LARGE_BYTES = 1 << 20


def requirements_digest(requirements: Requirements) -> str:
    """A digest that differs if the files or the local packages they refer to differ.

    In a folder, sources count by content (large ones by size and time), and archives by
    size. Of an editable package, only the files that its installation reads count: its
    modules are read in place.
    """
    digest = hashlib.sha256()
    for name, text in requirements.files:
        digest.update(f"{name}\0{text}\0".encode(errors="surrogateescape"))
    for path in requirements.local:
        _update(digest, path, _SOURCES)
    for path in requirements.editable:
        _update(digest, path, _COMPILED)
        for name in _SETTINGS:
            _update(digest, path / name, ())
    return digest.hexdigest()


def _update(digest: hashlib._Hash, path: Path, sources: tuple[str, ...]) -> None:
    for part in _contents(path, sources):
        digest.update(part)
        digest.update(b"\0")


def _contents(path: Path, sources: tuple[str, ...]) -> Iterator[bytes]:
    """What we know here about a file or folder; hosts may have files that we lack."""
    try:
        if path.is_file():
            yield hashlib.sha256(path.read_bytes()).digest()
            return
        for where, folders, names in os.walk(path):
            folders[:] = sorted(f for f in folders if f[0] != "." and f not in _SKIPPED)
            if "pyvenv.cfg" in names:
                folders.clear()
                continue
            for name in sorted(names):
                file = Path(where, name)
                if name.endswith(_ARCHIVES):
                    yield f"{file.relative_to(path)} {file.stat().st_size}".encode()
                elif name.endswith(sources):
                    yield str(file.relative_to(path)).encode(errors="surrogateescape")
                    status = file.stat()
                    if status.st_size < _LARGE_BYTES:
                        yield file.read_bytes()
                    else:  # data rather than a source
                        yield f"{status.st_size} {status.st_mtime_ns}".encode()
    except OSError:
        return
