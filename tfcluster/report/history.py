"""What a report says about a run, from its record. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfcluster.base.states import TaskState
from tfcluster.record.events import integer, number, text
from tfcluster.record.metrics import Metrics, Sample
from tfcluster.record.run_status import RunView

_NOW = ("starting", "running", "stopping")


@dataclass(frozen=True, slots=True)
class Interval:
    """A period in which an attempt of a task was in one state. Unix times."""

    task: str
    attempt: int
    state: str
    """starting, running or stopping."""
    start_s: float
    end_s: float
    outcome: str = ""
    """The final state that followed; "" if none has."""


@dataclass(frozen=True, slots=True)
class History:
    """Everything that the record says about a run."""

    view: RunView
    now_s: float
    """The Unix time at which the record was read."""
    metrics: Metrics = field(default_factory=Metrics)
    spans: tuple[Interval, ...] = ()
    argv: tuple[str, ...] = ()
    version: str | None = None
    """The version of tfcluster."""
    machines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What each host has reported about itself."""
    versions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The libraries of each task that has reported them."""
    settings: Mapping[str, Any] | None = None
    """The configuration that the run was launched with."""

    @property
    def began_s(self) -> float:
        """When the run began, or when anything first happened if that is unknown."""
        times = [self.view.started_s, *(s.start_s for s in self.spans[:1])]
        times += [s.t for s in self.metrics.samples[:1]]
        return next((t for t in times if t is not None), self.now_s)

    @property
    def ended_s(self) -> float:
        """When the run ended; now if it has not."""
        return self.now_s if self.view.ended_s is None else self.view.ended_s

    def samples_of(self) -> dict[str, list[Sample]]:
        """The samples of each task, in the plan's order."""
        by_task: dict[str, list[Sample]] = {task.task: [] for task in self.view.tasks}
        for sample in self.metrics.samples:
            by_task.setdefault(sample.task, []).append(sample)
        return {task: samples for task, samples in by_task.items() if samples}


def history(
    view: RunView,
    events: Iterable[Mapping[str, Any]],
    metrics: Metrics,
    settings: Mapping[str, Any] | None,
    now_s: float,
) -> History:
    """The history of a run; ``events`` are the events of its record."""
    listed = list(events)
    run: Mapping[str, Any] = next((e for e in listed if e.get("type") == "run"), {})
    argv = run.get("argv")
    end_s = now_s if view.ended_s is None else view.ended_s
    if view.unknown_since_s is not None:
        end_s = view.unknown_since_s
    elif view.state.final and view.ended_s is None:  # its launcher died
        end_s = max((number(e, "t") or 0.0 for e in listed), default=now_s)
        end_s = max(end_s, *(s.t for s in metrics.samples[-1:]), 0.0)
    return History(
        view=view,
        now_s=now_s,
        metrics=metrics,
        spans=tuple(spans(listed, end_s)),
        argv=tuple(map(str, argv)) if isinstance(argv, list) else (),
        version=text(run, "version"),
        machines={str(e.get("host")): e for e in listed if e.get("type") == "machine"},
        versions={
            str(e.get("task")): e["versions"]
            for e in listed
            if e.get("type") == "versions" and isinstance(e.get("versions"), Mapping)
        },
        settings=settings,
    )


def spans(events: Sequence[Mapping[str, Any]], end_s: float) -> list[Interval]:
    """The periods of tasks in each state; a state that has not ended lasts until
    ``end_s``."""
    intervals: list[Interval] = []
    current: dict[str, tuple[int, str, float]] = {}

    def close(task: str, t_s: float, outcome: str = "") -> None:
        if (known := current.pop(task, None)) is not None:
            attempt, state, start_s = known
            end = max(start_s, t_s)
            intervals.append(Interval(task, attempt, state, start_s, end, outcome))

    for event in events:
        task, state, t_s = text(event, "task"), text(event, "state"), number(event, "t")
        if event.get("type") != "task" or task is None or t_s is None or state is None:
            continue
        attempt = integer(event, "attempt") or 0
        if state in _NOW:
            known = current.get(task)
            if known is None or known[:2] != (attempt, state):
                close(task, t_s)
                current[task] = attempt, state, t_s
        elif state in {each.value for each in TaskState if each.final}:
            close(task, t_s, state)
    for task in list(current):
        close(task, end_s)
    return sorted(intervals, key=lambda span: span.start_s)
