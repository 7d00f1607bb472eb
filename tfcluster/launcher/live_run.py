"""What every part of the launcher works on: the job, its record, the user's screen."""

from __future__ import annotations

from tfcluster.launcher.job import CurrentJob, Job
from tfcluster.launcher.journal import Journal
from tfcluster.launcher.progress import Progress
from tfcluster.launcher.run_output import RunOutput
from tfcluster.lifecycle.state import Plan
from tfcluster.record.paths import RunPaths


class LiveRun:
    """A run from its beginning to its end."""

    def __init__(
        self, current: CurrentJob, journal: Journal, show: RunOutput, paths: RunPaths
    ) -> None:
        self.current = current
        self.journal = journal
        self.show = show
        self.paths = paths
        self.progress = Progress(current.job.description.progress_timeout_s)

    @property
    def job(self) -> Job:
        return self.current.job

    @property
    def plan(self) -> Plan:
        return self.current.plan

    def say(self, text: str) -> None:
        """Show and record a message to the user."""
        self.journal.event("note", text=text)
        self.show.say(text)
