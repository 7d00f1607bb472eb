"""Builds descriptions for tests, which give only the values that matter to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tfcluster.plan.model import (
    Allocation,
    Description,
    Host,
    Restart,
    Runtime,
    Ssh,
    TaskGroup,
)
from tfcluster.schedulers import names


def describe(tasks: dict[str, int | TaskGroup], **given: Any) -> Description:
    """A description with these tasks: type -> count or group.

    A scheduler's section is given by its name: ``slurm={"nodes": 2}``.
    """
    sections = {
        name: given.pop(name) for name in names() if isinstance(given.get(name), dict)
    }
    groups = {
        kind: group if isinstance(group, TaskGroup) else TaskGroup(count=group)
        for kind, group in tasks.items()
    }
    values: dict[str, Any] = {
        "name": "test",
        "named": False,
        "backend": "local",
        "command": ("python", "train.py"),
        "workdir": Path("/data/project"),
        "python": ("/opt/venv/bin/python",),
        "env": {},
        "secrets": {},
        "runtime": Runtime(),
        "hosts": (),
        "ssh": Ssh(),
        "sections": sections,
        "launcher": "auto",
        "ports": None,
        "restart": Restart(),
        "start_timeout_s": 300.0,
        "progress_timeout_s": None,
        "grace_s": 10.0,
    }
    return Description(tasks=groups, **{**values, **given})


def hosts(*slots: int | None, gpus: int | None = None) -> Allocation:
    """Hosts h1, h2, ... with these numbers of slots."""
    devices = None if gpus is None else tuple(map(str, range(gpus)))
    return Allocation(
        hosts=tuple(
            Host(name=f"h{i}", address=f"10.0.0.{i}", slots=count, gpus=devices)
            for i, count in enumerate(slots, start=1)
        )
    )
