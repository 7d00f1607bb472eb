"""The one holder of a run's job, which changes while the run goes on."""

from __future__ import annotations

from tfcluster.launcher.job import Job
from tfcluster.model import Interpreter
from tfcluster.task_id import TaskId


class CurrentJob:
    """Everybody asks it for the job; only the launcher's loop changes it."""

    def __init__(self, job: Job) -> None:
        self.job = self.planned = job
        """``planned`` is the job after the resize that is being prepared, if any."""
        self.plan = job.plan()
        self.owners: set[tuple[TaskId, str]] = set()
        """All tasks and the hosts that they are on, or once were on."""
        self._note_owners()

    def use(self, job: Job) -> None:
        """Continue with this job, whose tasks may be on other hosts."""
        self.job = self.planned = job
        self.plan = job.plan()
        self._note_owners()

    def set_python(self, host: str, python: Interpreter) -> None:
        """Note that the preparation of a host has changed its interpreter."""
        same = self.planned is self.job
        self.job = self.job.with_python(host, python)
        self.planned = self.job if same else self.planned.with_python(host, python)

    def _note_owners(self) -> None:
        self.owners |= {(t, s.place.host.name) for t, s in self.job.specs.items()}
