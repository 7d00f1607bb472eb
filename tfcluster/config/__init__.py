"""Reads cluster.yaml, or the flags that replace it, into a checked ``Description``.

Importing this package is cheap: YAML is imported on use. It reads only
the configuration itself, contacts no host and resolves no name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfcluster.config.loaded import Loaded

__all__ = ["Loaded", "from_command", "load", "schema", "starter"]


def load(
    path: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    name: str | None = None,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str],
    python: str = sys.executable,
    passed: Sequence[str] = (),
) -> Loaded:
    """Read and check a configuration file.

    ``overrides`` are raw ``KEY=VALUE`` texts, ``name`` replaces the file's name,
    ``arguments`` are appended to every command, ``environ`` has the values of
    ``${VAR}``, ``python`` is the interpreter if the file names none, and ``passed`` has
    variables to pass on, as ``NAME`` or ``NAME=VALUE``. Raises ConfigError with all
    problems, sorted by place.
    """
    from tfcluster.config import pipeline

    return pipeline.load(
        path,
        overrides=overrides,
        name=name,
        arguments=arguments,
        environ=environ,
        python=python,
        passed=passed,
    )


def from_command(
    command: Sequence[str],
    *,
    count: int,
    ps: int = 0,
    gpus: int | None = None,
    hosts: str | None = None,
    overrides: Sequence[str] = (),
    name: str | None = None,
    environ: Mapping[str, str],
    cwd: Path,
    python: str = sys.executable,
    passed: Sequence[str] = (),
) -> Loaded:
    """The configuration given by flags alone: ``count`` workers that run ``command``.

    ``gpus`` is the number of GPUs of each worker. ``hosts`` is a hostlist in which
    ``name:4`` sets slots; without it all tasks run on this host. Raises ConfigError
    with all problems.
    """
    from tfcluster.config import pipeline

    return pipeline.from_command(
        command,
        count=count,
        ps=ps,
        gpus=gpus,
        hosts=hosts,
        overrides=overrides,
        name=name,
        environ=environ,
        cwd=cwd,
        python=python,
        passed=passed,
    )


def schema() -> dict[str, Any]:
    """The JSON Schema of cluster.yaml."""
    from tfcluster.config.json_schema import schema as make

    return make()


def starter(backend: str) -> str:
    """A commented cluster.yaml to start from. Raises ConfigError for an unknown one."""
    from tfcluster.config.templates import starter as text

    return text(backend)
