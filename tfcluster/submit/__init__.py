"""Launching outside of an allocation: submits a job and follows it.

``scheduler`` has the common types; ``slurm`` and ``sge`` have the pure functions for
each scheduler; the other modules serve both.
"""

from __future__ import annotations

from importlib import import_module

from tfcluster.submit.scheduler import Scheduler

_MODULES = {"slurm": "tfcluster.submit.slurm", "sge": "tfcluster.submit.sge"}


def scheduler_of(backend: str) -> Scheduler | None:
    """The scheduler from which ``backend`` gets its hosts; None: it needs none."""
    if backend not in _MODULES:
        return None
    scheduler: Scheduler = import_module(_MODULES[backend]).SCHEDULER
    return scheduler
