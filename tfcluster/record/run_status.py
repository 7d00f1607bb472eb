"""The state of a run as plain frozen data, for ``status`` and the live view."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from tfcluster.base.light_dataclasses import dataclass, field
from tfcluster.base.states import RunState, TaskState
from tfcluster.base.vocabulary import FORMAT_VERSION
from tfcluster.plan.description_json import to_plain

if TYPE_CHECKING:
    from tfcluster.documents import run as documents


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingView:
    """The counters of a ps, see ``documents.run``."""

    applied: int = 0
    dropped: int = 0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FitView:
    """Where a task is in Keras' ``fit``; None: unknown."""

    epoch: int
    """Counted from 1."""
    epochs: int | None = None
    epoch_step: int | None = None
    epoch_steps: int | None = None

    @property
    def steps_left(self) -> int | None:
        if self.epochs is None or self.epoch_steps is None:
            return None
        done = (self.epoch - 1) * self.epoch_steps + (self.epoch_step or 0)
        return max(0, self.epochs * self.epoch_steps - done)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskView:
    """One task, see ``documents.run``; times are Unix times."""

    task: str
    host: str | None = None
    address: str | None = None
    state: TaskState = TaskState.PENDING
    pid: int | None = None
    attempt: int = 0
    exit_code: int | None = None
    signal: str | None = None
    step: int | None = None
    steps_per_s: float | None = None
    log: str | None = None
    wait_share: float | None = None
    serving: ServingView | None = None
    cause: str | None = None
    phase: str | None = None
    since_s: float | None = None
    """When the state or the phase began."""
    seconds: float | None = None
    fit: FitView | None = None
    """Its position in the latest ``fit``, kept after ``fit`` has ended."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    rss_bytes: int | None = None
    cpu_s: float | None = None

    @property
    def state_words(self) -> str:
        """The state for people: a task that was stopped may never have started."""
        started = self.pid is not None or self.seconds or self.exit_code is not None
        if self.state is TaskState.STOPPED and not (started or self.signal):
            return "not started"
        return str(self.state)

    @property
    def left_s(self) -> float | None:
        """The seconds until ``fit`` ends at this speed, without validation."""
        steps = self.fit.steps_left if self.fit else None
        if self.state.final or steps is None or not self.steps_per_s:
            return None
        return steps / self.steps_per_s

    def to_json(self) -> documents.TaskReport:
        entries = to_plain(self)
        del entries["since_s"]
        entries["left_s"] = None if self.left_s is None else round(self.left_s, 1)
        return cast("documents.TaskReport", entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    host: str
    state: str = "pending"
    """pending | starting | ready | failed | lost | closed"""
    cause: str | None = None
    since_s: float | None = None
    stage: str | None = None
    """The stage of its start, see ``launcher.host_start``."""

    def to_json(self) -> documents.HostStatus:
        return {
            "host": self.host,
            "state": cast("documents.HostState", self.state),
            "cause": self.cause,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureView:
    """A failure; ``task`` is None if a host failed."""

    task: str | None = None
    host: str | None = None
    exit_code: int | None = None
    signal: str | None = None
    cause: str = "failed"
    log_tail: tuple[str, ...] = ()
    log: str | None = None

    @property
    def where(self) -> str:
        return " on ".join(filter(None, (self.task, self.host)))

    def to_json(self) -> documents.TaskFailure:
        return cast("documents.TaskFailure", to_plain(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultsView:
    """The last fetch of files from a host, see ``documents.run``."""

    host: str = ""
    state: str = "incomplete"
    folder: str | None = None
    there: str | None = None
    files: int = 0
    bytes: int = 0
    fetched: int = 0
    unchanged: int = 0
    sent_bytes: int = 0
    kept: tuple[tuple[str, str], ...] = ()
    """Files here that were not replaced, each with a reason, as in the next lists."""
    growing: tuple[tuple[str, str], ...] = ()
    missed: tuple[tuple[str, str], ...] = ()
    missed_count: int = 0
    cause: str | None = None

    def to_json(self) -> documents.FetchedResults:
        entries = to_plain(self)
        for key in ("kept", "growing", "missed"):
            entries[key] = [{"path": path, "cause": why} for path, why in entries[key]]
        return cast("documents.FetchedResults", entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherView:
    """The process that drives the run; boot, pid and start time are unique."""

    pid: int
    host: str
    boot_id: str
    start_time: int
    """The clock ticks from boot to its start, as in ``/proc/PID/stat``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run, see ``documents.run``; times are Unix times."""

    run: str
    name: str
    named: bool = False
    backend: str | None = None
    state: RunState = RunState.STARTING
    reason: str | None = None
    since_s: float | None = None
    """When the state began."""
    unknown_since_s: float | None = None
    """This host does not know whether the run continued after this time."""
    exit_code: int | None = None
    started_s: float | None = None
    ended_s: float | None = None
    launcher: LauncherView | None = None
    first_failure: FailureView | None = None
    secondary: tuple[FailureView, ...] = ()
    hosts: tuple[HostView, ...] = ()
    tasks: tuple[TaskView, ...] = ()
    swept: int = 0
    notes: tuple[str, ...] = ()
    results: tuple[ResultsView, ...] = ()
    follows: str | None = None
    requeues: int = 0
    requeued: bool = False
    continued_as: str | None = None

    @property
    def awaits_another_start(self) -> bool:
        """Whether its job was requeued and has not started again."""
        return self.requeued and self.continued_as is None

    @property
    def only_a_scheduler_knows(self) -> bool:
        """Whether no launcher writes the record: not yet, or its job was killed."""
        silent = self.launcher is None or self.unknown_since_s is not None
        return silent and not self.state.final

    def to_json(self) -> documents.Status:
        first, launcher = self.first_failure, self.launcher
        return {
            "schema": FORMAT_VERSION,
            "run": self.run,
            "name": self.name,
            "backend": self.backend,
            "state": self.state.value,
            "exit_code": self.exit_code,
            "started": iso_time(self.started_s),
            "ended": iso_time(self.ended_s),
            "first_failure": first.to_json() if first else None,
            "tasks": [task.to_json() for task in self.tasks],
            "reason": self.reason,
            "unknown_since": iso_time(self.unknown_since_s),
            "hosts": [host.to_json() for host in self.hosts],
            "secondary_failures": [failure.to_json() for failure in self.secondary],
            "swept": self.swept,
            "notes": list(self.notes),
            "results": [results.to_json() for results in self.results],
            "launcher": {"pid": launcher.pid, "host": launcher.host}
            if launcher
            else None,
            "follows": self.follows,
            "requeues": self.requeues,
            "requeued": self.requeued,
            "continued_as": self.continued_as,
        }


def iso_time(t_s: float | None) -> str | None:
    """``2026-11-20T10:15:00Z``; None if the time is unknown or invalid."""
    if t_s is None:
        return None
    try:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(t_s))
    except (OSError, OverflowError, ValueError):
        return None
