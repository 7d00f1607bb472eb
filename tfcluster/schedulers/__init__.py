"""Schedulers: where hosts come from, how agents start there, and how jobs are queued.

Each is a folder of this package, or a package that a site installs with an entry point
in the group ``tfcluster.schedulers``. All are imported on use. A scheduler knows hosts,
slots and argv lists, but no task types.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

from tfcluster.base.errors import ConfigError, Problem

if TYPE_CHECKING:
    from tfcluster.plan.model import Description
    from tfcluster.schedulers.base import BatchScheduler, Scheduler

GROUP = "tfcluster.schedulers"


def names() -> tuple[str, ...]:
    """The names of the schedulers in this package: a folder each."""
    return tuple(m.name for m in pkgutil.iter_modules(__path__) if m.ispkg)


def built_in() -> tuple[Scheduler, ...]:
    return tuple(filter(None, map(find, names())))


def find(name: str) -> Scheduler | None:
    """The scheduler of that name; None if there is none, nor an installed one."""
    if name in names():
        scheduler: Scheduler = import_module(f"{__name__}.{name}").SCHEDULER
        return scheduler
    # Imported here: it is slow, and the schedulers of this package do not need it.
    from importlib.metadata import entry_points

    installed = next(iter(entry_points(group=GROUP, name=name)), None)
    return None if installed is None else installed.load()


def get(name: str) -> Scheduler:
    scheduler = find(name)
    if scheduler is None:
        hint = "--set backend=local runs all tasks on this machine"
        raise ConfigError(
            [Problem(f"backend {name}", "it is not installed here", hint)]
        )
    return scheduler


def batch_scheduler(name: str) -> BatchScheduler | None:
    """The scheduler of that name if it has a queue to which jobs are submitted."""
    from tfcluster.schedulers.base import BatchScheduler

    scheduler = find(name)
    return scheduler if isinstance(scheduler, BatchScheduler) else None


def of_launcher(description: Description) -> Scheduler:
    """What starts the agents, by the option ``launcher``. Raises ConfigError."""
    own, launcher = get(description.backend), description.launcher
    if launcher in ("auto", own.launcher):
        return own
    for other in built_in():
        if other.launcher == launcher and other.reaches(own):
            return other
    where = description.origins.get("launcher", description.source)
    message = f"launcher {launcher} cannot start agents on hosts of backend {own.name}"
    raise ConfigError([Problem(where, message, "launcher: auto")])
