"""Writes configurations for tests and loads them the way the command does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tfcluster.base.errors import ConfigError, Problem
from tfcluster.config import Loaded, load

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
    """The problems of this configuration, their places relative to ``folder``."""
    try:
        result = loaded(folder, content, overrides=overrides, environ=environ)
    except ConfigError as error:
        reported = list(error.problems)
    else:
        reported = list(result.warnings)
    prefix = f"{folder}/"
    return [
        Problem(
            problem.where.removeprefix(prefix),
            problem.message,
            problem.hint,
            problem.warning,
        )
        for problem in reported
    ]


class Bad(NamedTuple):
    """An invalid configuration and the error expected for it."""

    content: str | bytes
    where: str
    """``line:column``, as printed after ``cluster.yaml:``."""
    words: str
    """The beginning of the message printed after ``error: ``."""


def check_bad(bad: Bad, folder: Path) -> None:
    """Check that it is refused with exactly this one error."""
    (reported,) = map(str, problems(folder, bad.content))
    place, _, words = reported.partition(": error: ")
    assert place == f"cluster.yaml:{bad.where}", reported
    assert words.startswith(bad.words), reported
