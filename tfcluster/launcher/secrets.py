"""Reads secrets from their configured sources, at launch and not before."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from tfcluster.base.errors import ConfigError, Problem
from tfcluster.plan.model import Secret

MAX_SECRET_BYTES = 65_536


def read_secrets(
    secrets: Mapping[str, Secret],
    origins: Mapping[str, str],
    environ: Mapping[str, str],
) -> dict[str, str]:
    """The value of each secret. Raises a ConfigError that lists all unreadable ones."""
    values: dict[str, str] = {}
    problems: list[Problem] = []
    for name, secret in secrets.items():
        where = origins.get(f"secrets.{name}", f"secrets.{name}")
        try:
            values[name] = _read(secret, environ)
        except (OSError, ValueError, KeyError) as error:
            why = error.strerror if isinstance(error, OSError) else error.args[0]
            problems.append(Problem(where, f"secret {name}: {why}"))
    if problems:
        raise ConfigError(problems)
    return values


def _read(secret: Secret, environ: Mapping[str, str]) -> str:
    if secret.file is not None:
        return _read_file(secret.file)
    if secret.env is None or secret.env not in environ:
        raise KeyError(f"${secret.env} is not set here")
    return environ[secret.env]


def _read_file(path: Path) -> str:
    """The file's text without its final newline. Raises ValueError if unusable."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} is not a file")
        if status.st_mode & 0o077:
            raise ValueError(f"{path} can be read by others; chmod 600 {path}")
        data = file.read(MAX_SECRET_BYTES + 1)
    if len(data) > MAX_SECRET_BYTES:
        raise ValueError(f"{path} is over {MAX_SECRET_BYTES} bytes long")
    text = data.decode("utf-8").removesuffix("\n")
    if "\0" in text:
        raise ValueError(f"{path} holds a NUL byte")
    return text
