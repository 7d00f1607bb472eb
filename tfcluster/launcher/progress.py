"""How far the training tasks are, and whether they still make steps.

Time is an argument, so that tests can replay it; knows nothing about channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tfcluster.base.light_dataclasses import as_dict, dataclass, field
from tfcluster.base.task_id import TaskId
from tfcluster.lifecycle.events import Stalled
from tfcluster.lifecycle.state import first_of
from tfcluster.protocol.messages import Exited, Gpu, Usage
from tfcluster.protocol.task_events import Serving, Stack, Step

STACK_LINES = 18
STACKS_WAIT_S = 3.0
"""How long hung tasks have to send their stacks."""

_BUSY_SHARE = 0.02
"""A task that uses this share of a core is at work; one that waits uses less."""
_MEASUREMENTS = 2
"""A task counts as idle only after this many measurements, which may be rare."""
_MOST_GPUS = 64


@dataclass(slots=True)
class _TaskProgress:
    since: float
    """When the task last made a step, or was started."""
    reports: bool
    """Whether the task is expected to report steps, or has done so."""
    attempt: int = 0
    cpu_s: float | None = None
    """The CPU time that the task had used by ``since``."""
    measured: int = 0
    """How often its usage has been measured since."""
    latest: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    """What the task uses, as its agent has measured it."""


class Progress:
    """The latest report of every training task."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._tasks: dict[TaskId, _TaskProgress] = {}

    def started(
        self, task: TaskId, now: float, *, reports: bool, attempt: int = 0
    ) -> None:
        """Note that an attempt began; ``reports``: it runs under the runtime."""
        self._tasks[task] = _TaskProgress(since=now, reports=reports, attempt=attempt)

    def ended(self, task: TaskId) -> None:
        if task in self._tasks:
            self._tasks[task].reports = False

    def is_expected_of(self, task: TaskId) -> bool:
        """Whether the task runs under the runtime or has reported a step."""
        entry = self._tasks.get(task)
        return entry is not None and entry.reports

    def step(self, task: TaskId, report: Step, now: float) -> None:
        entry = self._tasks.get(task)
        if entry is None:
            return
        if report.step != entry.latest.get("step"):
            entry.since, entry.reports = now, True
        values = as_dict(report)
        position = values.pop("position")
        values |= as_dict(position) if position else {}
        entry.latest = {k: v for k, v in values.items() if v not in (None, {})}

    def epoch(
        self, task: TaskId, epoch: int, values: Mapping[str, float | None]
    ) -> None:
        """Note the metrics of an epoch, which cover the rows of all ranks."""
        entry = self._tasks.get(task)
        if entry is not None and entry.latest.get("epoch") == epoch and values:
            entry.latest = {**entry.latest, "metrics": dict(values)}

    def last_step(self, task: TaskId) -> int | None:
        entry = self._tasks.get(task)
        return None if entry is None else entry.latest.get("step")

    def serving(self, task: TaskId, report: Serving) -> None:
        if (entry := self._tasks.get(task)) is not None:
            entry.latest = {**entry.latest, "serving": as_dict(report)}

    def uses(self, task: TaskId, told: Usage | Exited) -> None:
        """Note what a task uses now, or has used when it ended."""
        entry = self._tasks.get(task)
        if entry is None or entry.attempt != told.attempt:
            return
        # The value of the task's first process alone may be smaller.
        entry.usage["cpu_s"] = max(told.cpu_s, entry.usage.get("cpu_s", 0.0))
        entry.measured += 1
        if isinstance(told, Exited):
            entry.usage["max_rss_bytes"] = told.max_rss_bytes
            return
        entry.usage["rss_bytes"] = told.rss_bytes
        entry.usage["processes"] = told.processes
        if told.gpus:
            entry.usage["gpus"] = [_gpu(gpu) for gpu in told.gpus[:_MOST_GPUS]]

    def unwatch(self) -> None:
        """Detect no more stalls; the tasks' reports are kept."""
        self._timeout_s = None

    def stalled(self, now: float) -> tuple[TaskId, ...]:
        """The tasks that made no step for too long, if they ever made one or wait."""
        if self._timeout_s is None:
            return ()
        return tuple(
            task
            for task, entry in self._tasks.items()
            if entry.reports
            and now - entry.since > self._timeout_s
            and not _computes(entry, now)
        )

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """The latest report of each task that has made one, for the record."""
        return {
            str(task): {**entry.latest, **entry.usage}
            for task, entry in self._tasks.items()
            if entry.latest or entry.usage
        }

    def attempts(self) -> dict[str, int]:
        return {str(task): entry.attempt for task, entry in self._tasks.items()}


def _computes(entry: _TaskProgress, now: float) -> bool:
    """Whether a task may have computed all the time; then its time begins anew."""
    used_s, past_s = entry.usage.get("cpu_s"), entry.cpu_s or 0.0
    if "step" in entry.latest or used_s is None:
        return False
    if used_s - past_s < _BUSY_SHARE * (now - entry.since):
        return entry.measured < _MEASUREMENTS
    entry.since, entry.cpu_s, entry.measured = now, used_s, 0
    return True


def _gpu(gpu: Gpu) -> dict[str, float]:
    values = {key: value for key, value in vars(gpu).items() if value is not None}
    return {key: values[key] for key in values if key != "uuid"}


def blame(
    stalled: Iterable[TaskId],
    answers: Mapping[TaskId, Stack],
    ranks: Mapping[int, TaskId],
    timeout_s: float,
) -> Stalled:
    """The culprits, from the hung tasks' answers or their absence, and the cause."""
    tasks = list(stalled)
    place = {task: rank for rank, task in ranks.items()}
    answered = sorted(answers, key=lambda task: place.get(task, len(place)))
    waiting = {t: what for t in answered if (what := answers[t].waiting)}
    awaited: dict[TaskId, None] = {}
    for what in waiting.values():
        for rank in what.ranks:
            if ranks.get(rank) not in (None, *waiting):
                awaited[ranks[rank]] = None
    # If no task says whom it waits for, the tasks that do not wait are blamed.
    culprits = list(awaited) or [task for task in tasks if task not in waiting]
    text = f"no step for {timeout_s:g} s"
    stack = _stack_of(culprits, answers)
    if waiting and culprits:
        who = f"{_names(waiting)} wait for {_names(culprits)}"
        return Stalled(f"{text}: {who}{_silent(culprits, answers)}", stack)
    return Stalled(f"{text}: {_names(tasks)}{_silent(tasks, answers)}", stack)


def _stack_of(
    culprits: Iterable[TaskId], answers: Mapping[TaskId, Stack]
) -> tuple[str, ...]:
    for task in culprits:
        if task in answers:
            lines = answers[task].text.splitlines()[-STACK_LINES:]
            return (f"{task} is here:", *lines)
    return ()


def _names(tasks: Iterable[TaskId]) -> str:
    return first_of([str(task) for task in tasks])


def _silent(tasks: Iterable[TaskId], answers: Mapping[TaskId, Stack]) -> str:
    mute = [task for task in tasks if task not in answers]
    if not mute:
        return ""
    why = "stopped, stuck outside Python, or TensorFlow not imported yet"
    return f" ({_names(mute)} did not answer: {why})"
