"""What a report says about a run, from its record. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfcluster.record.events import Event
from tfcluster.record.metrics import Metrics, Sample
from tfcluster.record.run_status import RunView


@dataclass(frozen=True, slots=True)
class History:
    """Everything that the record says about a run."""

    view: RunView
    now_s: float
    """The Unix time at which the record was read."""
    events: Sequence[Event] = ()
    metrics: Metrics = field(default_factory=Metrics)
    settings: Mapping[str, Any] | None = None
    """The configuration that the run was launched with."""

    @property
    def began_s(self) -> float:
        times = [event["t"] for event in self.events[:1]]
        times += [sample.t for sample in self.metrics.samples[:1]]
        return self.view.started_s or min(times, default=self.now_s)

    @property
    def ended_s(self) -> float:
        """When the run ended; now if it has not, or the latest trace of a lost run."""
        view = self.view
        end_s = view.unknown_since_s if view.ended_s is None else view.ended_s
        if end_s is not None or not view.state.final:
            return self.now_s if end_s is None else end_s
        times = [event["t"] for event in self.events]
        times += [sample.t for sample in self.metrics.samples]
        return max(times, default=self.now_s)

    def facts_of(self, kind: str, key: str) -> dict[str, Event]:
        return {str(e.get(key)): e for e in self.events if e["type"] == kind}

    def samples_of(self) -> dict[str, list[Sample]]:
        by_task: dict[str, list[Sample]] = {task.task: [] for task in self.view.tasks}
        for sample in self.metrics.samples:
            by_task.setdefault(sample.task, []).append(sample)
        return {task: samples for task, samples in by_task.items() if samples}
