"""Copies of the files that the chief has saved, under the other ranks' names for them.

If a program names a folder after the time, at random or as a temporary folder, it has a
different name on every rank. A name is the path of a file or folder, or the common
prefix of several files (checkpoints).
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

Words: TypeAlias = list[Any]
"""The fields of ``Saved`` as JSON values: path, kind, endings and sizes."""

MAX_BYTES = 1 << 30
"""Maximum bytes sent to a host that does not see the chief's files."""

_CHECKPOINT = re.compile(r"(-\d+)?\.(index|data-\d+-of-\d+)")
_CLOCK_S = 2.0
"""How far a file system's clock may be behind the host's."""

INDEX = "checkpoint"
"""TensorFlow's list of the checkpoints in a folder; its paths are relative."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The files that one of the chief's paths stands for."""

    path: str
    kind: str
    """file | folder | prefix"""
    endings: tuple[str, ...]
    """Each file's path without the prefix ``path``; empty for a single file."""
    sizes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The total size of the files."""
        return sum(self.sizes)

    def as_words(self) -> Words:
        """The fields as JSON values."""
        return [self.path, self.kind, list(self.endings), list(self.sizes)]

    @classmethod
    def of_words(cls, words: Words) -> Saved:
        """Undo ``as_words``. Raises ValueError for an ending that leads elsewhere."""
        path, kind, endings, sizes = words
        if any(".." in Path(ending).parts for ending in endings):
            raise ValueError(f"{path}: {endings}")
        return cls(path, kind, tuple(endings), tuple(sizes))

    def is_here(self) -> bool:
        """Whether this host sees these files; they must have the same sizes."""
        try:
            sizes = [Path(self.path + end).stat().st_size for end in self.endings]
        except OSError:
            return False
        return tuple(sizes) == self.sizes


def described(path: str, *, prefix: bool, since: float = 0.0) -> Saved | None:
    """The files saved as ``path`` since the time ``since``; None if there are none.

    ``since`` is in seconds since the epoch. Other files of the program in the same
    folder are not included. Raises OSError.
    """
    whole = Path(path)
    if prefix:
        names = [entry.name for entry in whole.parent.glob("*")]
        endings = [
            name[len(whole.name) :] for name in names if name.startswith(whole.name)
        ]
        return _saved(path, "prefix", sorted(filter(_CHECKPOINT.fullmatch, endings)))
    if whole.is_file():
        return _saved(path, "file", [""])
    files = [
        entry
        for entry in sorted(whole.rglob("*"))
        if entry.is_file() and entry.stat().st_mtime >= since - _CLOCK_S
    ]
    return _saved(path, "folder", [f"/{file.relative_to(whole)}" for file in files])


def _saved(path: str, kind: str, endings: Iterable[str]) -> Saved | None:
    file_endings = tuple(endings)
    if not file_endings:
        return None
    sizes = tuple(Path(path + ending).stat().st_size for ending in file_endings)
    return Saved(path, kind, file_endings, sizes)


def link(saved: Saved, path: str) -> None:
    """Link or copy the chief's files to ``path``; they outlive the chief's names.

    Raises OSError.
    """
    _clear(saved, path)
    for ending in saved.endings:
        _link_file(saved.path + ending, path + ending)
    if saved.kind == "prefix":
        index = Path(saved.path).parent / INDEX
        if index.is_file():
            target = Path(path).parent / INDEX
            target.write_text(_renamed(index.read_text(), saved.path, path))


def packed(saved: Saved) -> bytes:
    """The contents of all files, concatenated; the checkpoint list comes last."""
    parts = [Path(saved.path + ending).read_bytes() for ending in saved.endings]
    index = Path(saved.path).parent / INDEX
    if saved.kind == "prefix" and index.is_file():
        parts.append(index.read_bytes())
    return b"".join(parts)


def unpack(saved: Saved, data: bytes, path: str) -> None:
    """Write the data of ``packed`` to ``path``. Raises OSError."""
    _clear(saved, path)
    start = 0
    for ending, size in zip(saved.endings, saved.sizes, strict=True):
        target = Path(path + ending)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data[start : start + size])
        start += size
    if data[start:]:
        text = _renamed(data[start:].decode(), saved.path, path)
        (Path(path).parent / INDEX).write_text(text)


def _clear(saved: Saved, path: str) -> None:
    """Remove the checkpoints that the chief has removed."""
    if saved.kind == "prefix":
        earlier = described(path, prefix=True)
        for ending in earlier.endings if earlier else ():
            if ending not in saved.endings:
                Path(path + ending).unlink()


def _link_file(source: str, path: str) -> None:
    target, temporary = Path(path), Path(f"{path}.tfcluster")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary.unlink(missing_ok=True)
    try:
        temporary.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, temporary)
    temporary.replace(target)
    # replace() does nothing if both are names of the same file already.
    temporary.unlink(missing_ok=True)


def _renamed(index: str, chiefs: str, ours: str) -> str:
    """The checkpoint list, with prefixes renamed."""
    names = Path(chiefs).name, Path(ours).name
    folders = str(Path(chiefs).parent), str(Path(ours).parent)
    return index.replace(f'"{folders[0]}/', f'"{folders[1]}/').replace(
        f'"{names[0]}-', f'"{names[1]}-'
    )
