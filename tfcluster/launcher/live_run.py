"""What every part of the launcher works on: job, journal, progress, screen."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tfcluster.launcher.job import CurrentJob, Job
from tfcluster.launcher.progress import Progress
from tfcluster.launcher.run_output import RunOutput
from tfcluster.lifecycle.state import Plan
from tfcluster.record.events import Writer
from tfcluster.record.metrics import MetricsWriter
from tfcluster.record.paths import RunPaths
from tfcluster.record.replay import Replay
from tfcluster.record.run_status import RunView


class Journal:
    def __init__(
        self, writer: Writer, metrics: MetricsWriter, plan: Mapping[str, Any]
    ) -> None:
        self._writer = writer
        self._metrics = metrics
        self._folding = Replay(plan)
        self._progress: dict[str, Any] | None = None

    def event(self, kind: str, **fields: Any) -> None:
        """Record an event; fields that are None are left out."""
        values = {key: value for key, value in fields.items() if value is not None}
        event = {"type": kind, **values}
        self._writer.append(event)
        self._folding.add({"t": time.time(), **event})

    def progress(
        self, tasks: Mapping[str, Mapping[str, Any]], attempts: Mapping[str, int]
    ) -> None:
        """Record the tasks' progress, which is also the launcher's heartbeat."""
        now_s = time.time()
        self._progress = {"t": now_s, "tasks": dict(tasks)}
        self._writer.progress(tasks)
        sample = {t: {"attempt": attempts[t], **tasks[t]} for t in tasks}
        self._metrics.sample(now_s, sample)

    def metrics(self, kind: str, task: str, **fields: Any) -> None:
        """Record a line of metrics other than the samples of ``progress``."""
        line = {"t": round(time.time(), 3), "type": kind, "task": task, **fields}
        self._metrics.add(line)

    def view(self) -> RunView:
        return self._folding.view(self._progress)


class LiveRun:
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
        self.journal.event("note", text=text)
        self.show.say(text)
