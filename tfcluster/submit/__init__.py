"""Launching where nothing is allocated yet: a job is submitted and followed.

``scheduler`` has the words, ``slurm`` and ``sge`` the pure functions of each scheduler;
the other modules are what both share.
"""

from __future__ import annotations

from importlib import import_module

from tfcluster.submit.scheduler import Scheduler

_MODULES = {"slurm": "tfcluster.submit.slurm", "sge": "tfcluster.submit.sge"}


def scheduler_of(backend: str) -> Scheduler | None:
    """The scheduler that gives ``backend`` its hosts; None: it needs none."""
    if backend not in _MODULES:
        return None
    scheduler: Scheduler = import_module(_MODULES[backend]).SCHEDULER
    return scheduler
