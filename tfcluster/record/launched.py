"""What a run was launched with: its Description, in the run's folder.

``rerun`` launches it again, ``tensorboard`` finds the working directory in it, and
``stop`` and ``fetch`` the hosts.
"""

from __future__ import annotations

from pathlib import Path

from tfcluster.base.errors import ConfigError, Problem
from tfcluster.plan.description_json import from_plain, to_plain
from tfcluster.plan.model import Description
from tfcluster.record.files import read_json, replace_json
from tfcluster.record.paths import RunPaths

_SCHEMA = 1


def save_launched(paths: RunPaths, description: Description) -> None:
    """Write the Description, unless it was submitted with one. Raises OSError."""
    if not paths.launched.exists():
        _save(paths.launched, description)


def save_resized(paths: RunPaths, description: Description) -> None:
    """Write the Description as it is after a resize. Raises OSError."""
    _save(paths.resized, description)


def launched(paths: RunPaths) -> Description:
    return _read(paths, paths.launched)


def resized(paths: RunPaths) -> Description:
    return _read(paths, paths.resized if paths.resized.exists() else paths.launched)


def _save(file: Path, description: Description) -> None:
    content = {"schema": _SCHEMA, "description": to_plain(description)}
    replace_json(file, content)


def _read(paths: RunPaths, file: Path) -> Description:
    content = read_json(file) or {}
    try:
        description = from_plain(Description, content["description"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = f"its record does not say how it was launched ({file})"
        raise ConfigError([Problem(paths.run, problem)]) from error
    assert isinstance(description, Description)  # what from_plain was asked for
    return description
