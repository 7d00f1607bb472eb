"""The input of a job that runs elsewhere and later: a private file in its run's folder.

It has the checked Description, so that neither the configuration file nor the user's
environment is needed in the job. Knows nothing of schedulers.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from tfcluster.errors import StartError
from tfcluster.model import Description, Secret
from tfcluster.record.files import open_private, read_json, write_all
from tfcluster.record.paths import RunPaths

FILE = "job-input.json"
_SECRET = "secret-"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInput:
    """What the launcher in the job reads."""

    description: Description
    """All its secrets are in files: the job does not have our environment."""
    state: Path
    """The state folder, which the job must see under the same path."""


def write_job_input(
    paths: RunPaths,
    description: Description,
    environ: Mapping[str, str],
    state: Path,
) -> None:
    """Write the JobInput into the run's folder, as private files. Raises OSError.

    Of ``environ``, it takes only the values of secrets, each into a file of its own.
    """
    secrets = dict(description.secrets)
    for name, secret in description.secrets.items():
        if secret.env is not None:
            file = paths.root / f"{_SECRET}{name}"
            write_private(file, os.fsencode(environ[secret.env]) + b"\n")
            secrets[name] = Secret(file=file)
    given = JobInput(description=replace(description, secrets=secrets), state=state)
    text = json.dumps(_plain(given), indent=1) + "\n"
    write_private(paths.root / FILE, text.encode())


def write_private(path: Path, data: bytes) -> None:
    """Write a new private file, durably. Raises OSError."""
    descriptor = open_private(path, os.O_WRONLY | os.O_EXCL)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(paths: RunPaths) -> JobInput:
    """Read the JobInput of this run. Raises StartError."""
    path = paths.root / FILE
    found = read_json(path)
    if found is None:
        raise StartError(
            f"{path} cannot be read here",
            hint="the state folder must be on a file system that the nodes share: "
            "TFCLUSTER_STATE_DIR",
        )
    try:
        given = _typed(JobInput, found)
    except (KeyError, TypeError, ValueError) as error:
        raise StartError(f"{path} is damaged: {error!r}") from error
    if not isinstance(given, JobInput):
        raise StartError(f"{path} is damaged")
    return given


def forget(paths: RunPaths) -> None:
    """Remove the files with secrets: the job is over and will not start again."""
    for file in (paths.root / FILE, *paths.root.glob(f"{_SECRET}*")):
        file.unlink(missing_ok=True)


def _plain(value: object) -> Any:
    """Frozen dataclasses as JSON types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: _plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _typed(kind: Any, value: Any) -> Any:
    """The inverse of ``_plain``. Raises KeyError, TypeError or ValueError."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None:
            return None
        (kind,) = (one for one in arguments if one is not type(None))
        return _typed(kind, value)
    if origin is tuple:
        return tuple(_typed(arguments[0], item) for item in value)
    if origin is not None:  # a mapping
        return {key: _typed(arguments[1], item) for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        known = {
            field.name: _typed(hints[field.name], value[field.name])
            for field in dataclasses.fields(kind)
        }
        return kind(**known)  # type: ignore[operator]  # a dataclass: checked above
    if issubclass(kind, Enum | Path):
        return kind(value)
    if not isinstance(value, (float, int) if kind is float else kind):
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value
