"""Backends: where hosts come from, and how agents are started; imported on use.

A backend knows hosts, slots and argv lists, but no task types.
"""

from __future__ import annotations

from importlib import import_module

from tfcluster.backends.base import Backend
from tfcluster.errors import ConfigError, Problem
from tfcluster.model import Description

_MODULES = {
    "local": "tfcluster.backends.local",
    "ssh": "tfcluster.backends.ssh",
    "slurm": "tfcluster.backends.slurm",
    "sge": "tfcluster.backends.sge",
}

# launcher -> the backend that implements it, and backends whose hosts it reaches.
_LAUNCHERS = {
    "local": ("local", ("local",)),
    "ssh": ("ssh", ("ssh", "slurm", "sge")),
    "srun": ("slurm", ("slurm",)),
    "qrsh": ("sge", ("sge",)),
}


def get(name: str) -> Backend:
    """The backend of that name. Raises ConfigError if it cannot launch."""
    if name not in _MODULES:
        raise ConfigError(
            [
                Problem(
                    f"backend {name}",
                    "this version plans for it, but cannot launch on it",
                    "--set backend=local runs all tasks on this machine",
                )
            ]
        )
    backend: Backend = import_module(_MODULES[name]).BACKEND
    return backend


def starting(description: Description) -> Backend:
    """The backend that starts the agents, as the option ``launcher`` says.

    Raises ConfigError if that launcher cannot reach the hosts.
    """
    backend, launcher = description.backend, description.launcher
    if launcher == "auto":
        return get(backend)
    starter, reaches = _LAUNCHERS[launcher]
    if backend not in reaches:
        raise ConfigError(
            [
                Problem(
                    description.origins.get("launcher", description.source),
                    f"launcher {launcher} cannot start agents on hosts of backend "
                    f"{backend}",
                    "launcher: auto",
                )
            ]
        )
    return get(starter)
