"""Writes configurations for tests and loads them the way the command does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tfcluster.config import Loaded, load
from tfcluster.errors import ConfigError, Problem

SMALLEST = "command: python train.py\ntasks: {worker: 2}\n"

ENVIRON = {"HOME": "/home/a", "DATA": "/data/digits", "EMPTY": ""}


def write(folder: Path, content: str | bytes, name: str = "cluster.yaml") -> Path:
    path = folder / name
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def loaded(
    folder: Path,
    content: str | bytes = SMALLEST,
    *,
    overrides: Sequence[str] = (),
    name: str | None = None,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] = ENVIRON,
) -> Loaded:
    return load(
        write(folder, content),
        overrides=overrides,
        name=name,
        arguments=arguments,
        environ=environ,
    )


def problems(
    folder: Path,
    content: str | bytes,
    *,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] = ENVIRON,
) -> list[Problem]:
    """What is wrong with it; the places are without the folder."""
    try:
        result = loaded(folder, content, overrides=overrides, environ=environ)
    except ConfigError as error:
        found = list(error.problems)
    else:
        found = list(result.warnings)
    prefix = f"{folder}/"
    return [
        Problem(each.where.removeprefix(prefix), each.message, each.hint, each.warning)
        for each in found
    ]


class Bad(NamedTuple):
    """A configuration that is refused, and what is said about it."""

    content: str | bytes
    where: str
    """``line:column``: what follows ``cluster.yaml:``."""
    words: str
    """What the problem as printed begins with, behind ``error: ``."""


def check_bad(bad: Bad, folder: Path) -> None:
    """It is refused with these words, and no other problem follows from that one."""
    (found,) = map(str, problems(folder, bad.content))
    place, _, words = found.partition(": error: ")
    assert place == f"cluster.yaml:{bad.where}", found
    assert words.startswith(bad.words), found
