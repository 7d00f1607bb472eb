"""The input of a job that runs elsewhere and later: a private file in its run's folder.

It has the checked Description, so that the job needs neither the configuration file nor
the user's environment. Knows nothing about schedulers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from tfcluster.description_json import from_plain, to_plain
from tfcluster.errors import StartError
from tfcluster.light_dataclasses import dataclass, replace
from tfcluster.model import Description, Secret
from tfcluster.record.files import open_private, read_json, write_all
from tfcluster.record.paths import RunPaths

FILE = "job-input.json"
_SECRET = "secret-"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInput:
    """What the launcher in the job reads."""

    description: Description
    """The Description. All its secrets are in files: the job lacks our environment."""
    state: Path
    """The state folder, which the job must see under the same path."""


def write_job_input(
    paths: RunPaths,
    description: Description,
    environ: Mapping[str, str],
    state: Path,
) -> None:
    """Write the JobInput into the run's folder, as private files. Raises OSError.

    From ``environ``, it takes only the values of secrets, each into a separate file.
    """
    secrets = dict(description.secrets)
    for name, secret in description.secrets.items():
        if secret.env is not None:
            file = paths.root / f"{_SECRET}{name}"
            write_private(file, os.fsencode(environ[secret.env]) + b"\n")
            secrets[name] = Secret(file=file)
    given = JobInput(description=replace(description, secrets=secrets), state=state)
    text = json.dumps(to_plain(given), indent=1) + "\n"
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
        given = from_plain(JobInput, found)
    except (KeyError, TypeError, ValueError) as error:
        raise StartError(f"{path} is damaged: {error!r}") from error
    if not isinstance(given, JobInput):
        raise StartError(f"{path} is damaged")
    return given


def forget(paths: RunPaths) -> None:
    """Remove the files with secrets: the job is over and will not start again."""
    for file in (paths.root / FILE, *paths.root.glob(f"{_SECRET}*")):
        file.unlink(missing_ok=True)
