"""Checks, shows and records agents' frames about tasks; turns them into events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfcluster.exit_causes import cause_of_exit, looks_like_victim
from tfcluster.launcher.end_order import EndOrder
from tfcluster.launcher.job import Job
from tfcluster.launcher.journal import Journal
from tfcluster.launcher.progress import Answer, Progress, metrics
from tfcluster.launcher.run_output import RunOutput
from tfcluster.launcher.trace_files import TraceFiles
from tfcluster.lifecycle.types import (
    AgentAskedToStop,
    Event,
    TaskExited,
    TaskListening,
    TaskSettled,
    TaskStarted,
    TaskUnstartable,
)
from tfcluster.light_dataclasses import as_dict
from tfcluster.record.metrics import EPOCH, EXCHANGES, exchange_totals
from tfcluster.task_id import TaskId
from tfcluster.wire import Frame, WireError, entries

_OF_TASKS = frozenset(
    [
        "log",
        "log_error",
        "started",
        "listening",
        "intruder",
        "failed",
        "exited",
        "settled",
        "event",
        "usage",
    ]
)
_MAX_TEXT = 300
_MOST_TOTALS = 20
_MOST_VERSIONS = 20
_MAX_SAID = 1000
_MAX_PHASE = 80
_UNLIMITED = ("step", "serving", "epoch", "exchanges", "trace")
"""Only the latest of these events is kept, or the record bounds their number."""


Keep = Callable[[str, TaskId, Sequence[str], int], None]
"""Called with the host, the task, lines of its output, and how many were skipped."""


class TaskFrames:
    """Handles frames about tasks; remembers pids and causes that tasks reported."""

    def __init__(
        self,
        job: Job,
        journal: Journal,
        show: RunOutput,
        progress: Progress,
        keep: Keep,
        traces: TraceFiles,
    ) -> None:
        self._job = job
        self._journal = journal
        self._show = show
        self._keep = keep
        self._traces = traces
        self.progress = progress
        self._owners = {(t, s.place.host.name) for t, s in job.specs.items()}
        self.answers: dict[TaskId, Answer] = {}
        """Answers to the last request for stacks."""
        self.cold: set[TaskId] = set()
        """Tasks whose program needs a fresh interpreter."""
        self._facts: dict[tuple[TaskId, int], dict[str, Any]] = {}
        self._causes: dict[tuple[TaskId, int], str] = {}
        self._said_count: dict[tuple[TaskId, int], int] = {}
        self._warned: set[str] = set()
        self._ends = EndOrder()

    def facts(self, task: TaskId, attempt: int) -> dict[str, Any]:
        """Facts about an attempt for the record, such as host and pid."""
        return self._facts.get((task, attempt), {})

    def use(self, job: Job) -> None:
        """Continue with this job, whose tasks may be on other hosts; frames from their
        old hosts stay valid."""
        self._job = job
        self._owners |= {(t, s.place.host.name) for t, s in job.specs.items()}

    def received(self, host: str, frame: Frame, now: float) -> list[Event]:
        """The lifecycle events that result from a frame.

        Raises WireError if the frame violates the protocol or is about a task that this
        host does not have.
        """
        match frame["type"]:
            case "note":
                self._note(_of_host(host, _text(frame, "text")))
                return [AgentAskedToStop(host)] if frame.get("signal") == "TERM" else []
            case "swept":
                self._swept(host, frame)
                return []
            case "unkillable":
                pids = ", ".join(str(pid) for pid in entries(frame, "pids"))
                self._note(
                    f"{host}: pids {pids} are still alive after SIGKILL; it may need a "
                    "reboot"
                )
                return []
        if frame["type"] not in _OF_TASKS:
            return []  # from a newer agent
        task = self._task(host, frame)
        if frame["type"] == "log":
            self._log(host, task, frame)
            return []
        if frame["type"] == "log_error":
            lost = _number(frame, "dropped_bytes")
            cause = _text(frame, "cause")
            self._note(
                f"{task} on {host}: cannot write its log: {cause}, {lost} bytes dropped"
            )
            return []
        return self._about(host, task, _number(frame, "attempt"), frame, now)

    def _about(
        self, host: str, task: TaskId, attempt: int, frame: Frame, now: float
    ) -> list[Event]:
        key = (task, attempt)
        match frame["type"]:
            case "started":
                self._facts[key] = {"host": host, "pid": _number(frame, "pid")}
                return [TaskStarted(task, attempt)]
            case "listening":
                return [TaskListening(task, attempt)]
            case "intruder":
                return [TaskUnstartable(task, attempt, _intrusion(frame))]
            case "failed":
                return [TaskUnstartable(task, attempt, _text(frame, "cause"))]
            case "exited":
                about_s = now - _seconds(frame.get("ago_s"))
                at_s = self._ends.at_s(host, _number(frame, "death"), about_s)
                return [self._exited(key, frame, at_s)]
            case "settled":
                return [TaskSettled(task, attempt)]
            case "usage":
                self.progress.uses(task, attempt, frame)
            case "event":
                self._said(host, key, frame.get("event"), now)
        return []

    def _exited(self, key: tuple[TaskId, int], frame: Frame, at_s: float) -> TaskExited:
        task, attempt = key
        code, signal = frame.get("code"), frame.get("signal")
        if not isinstance(code, int | None) or not isinstance(signal, str | None):
            raise WireError("code must be a number, signal a name")
        if signal is not None:
            # Frames have the signal names of kill(1), everything else has signal(7)'s.
            signal = f"SIG{signal.removeprefix('SIG')}"
        tail = tuple(str(line)[:2000] for line in entries(frame, "tail"))[-20:]
        cause = cause_of_exit(
            code=code, signal=signal, oom=bool(frame.get("oom")), tail=tail
        )
        said = self._causes.get(key)
        if cause is not None and signal is None and said:
            cause = said
        facts = self._facts.setdefault(key, {})
        facts["seconds"] = frame.get("seconds")
        self.progress.uses(task, attempt, frame)
        return TaskExited(
            task=task,
            attempt=attempt,
            code=code,
            signal=signal,
            cause=cause,
            tail=tail,
            stopped=bool(frame.get("stopped")),
            victim=signal is None and looks_like_victim(cause, tail),
            exchanged=frame.get("exchanged") is True,
            at_s=at_s,
        )

    def _said(
        self, host: str, key: tuple[TaskId, int], event: object, now: float
    ) -> None:
        """Handle an event from the task itself, which may send anything."""
        if not isinstance(event, dict):
            return
        task, attempt = key
        if event.get("type") not in _UNLIMITED and not self._may_say_more(key):
            return
        match event.get("type"):
            case "step":
                self.progress.step(task, event, now)
            case "serving":
                self.progress.serving(task, event)
            case "epoch" if isinstance(event.get("epoch"), int):
                epoch, said = event["epoch"], metrics(event)
                step = event.get("step")
                if not isinstance(step, int):
                    step = self.progress.last_step(task)
                keys = {"attempt": attempt, "step": step, "epoch": epoch}
                self._journal.metrics(EPOCH, str(task), **keys, metrics=said)
                self.progress.epoch(task, epoch, said)
            case "exchanges":
                totals = [as_dict(each) for each in exchange_totals(event)][
                    :_MOST_TOTALS
                ]
                keys = {"attempt": attempt, "totals": totals}
                self._journal.metrics(EXCHANGES, str(task), **keys)
            case "versions" if isinstance(event.get("versions"), dict):
                known = list(event["versions"].items())[:_MOST_VERSIONS]
                told = {str(n)[:_MAX_PHASE]: str(v)[:_MAX_PHASE] for n, v in known}
                self._journal.event("versions", task=str(task), versions=told)
            case "phase":
                phase = str(event.get("phase"))[:_MAX_PHASE]
                self._journal.event(
                    "task", task=str(task), attempt=attempt, phase=phase
                )
            case "trace":
                self._traces.add(task, attempt, host, event)
            case "waiting":
                said = _waiting({"waiting": event}) or {}
                self._journal.event(
                    "waiting",
                    task=str(task),
                    attempt=attempt,
                    **{key: said.get(key) for key in ("since_s", "what", "for")},
                )
            case "warning" | "note":
                self._warn(task, event["type"], str(event.get("text"))[:_MAX_TEXT])
            case "cold_start":
                self.cold.add(task)
                self._warn(task, "note", str(event.get("text"))[:_MAX_TEXT])
            case "failure":
                self._causes[key] = str(event.get("cause"))[:_MAX_TEXT]
            case "stack":
                text, waiting = str(event.get("text")), _waiting(event)
                self.answers[task] = Answer(stack=text, waiting=waiting)
                self._journal.event("stack", task=str(task), text=text, waiting=waiting)

    def _warn(self, task: TaskId, kind: str, text: str) -> None:
        """Show a warning or note once: ranks that run the same program all issue it."""
        if text not in self._warned:
            self._warned.add(text)
            self._note(f"{kind}: {task}: {text}")

    def _may_say_more(self, key: tuple[TaskId, int]) -> bool:
        """Limit a task's events, because they all go into the record."""
        said = self._said_count[key] = self._said_count.get(key, 0) + 1
        if said == _MAX_SAID:
            self._note(f"{key[0]} sends too many events; further ones are not recorded")
        return said < _MAX_SAID

    def _log(self, host: str, task: TaskId, frame: Frame) -> None:
        lines = [str(line) for line in entries(frame, "lines")]
        dropped = frame.get("dropped")
        skipped = dropped if isinstance(dropped, int) else 0
        self._show.log(str(task), lines, skipped)
        self._keep(host, task, lines, skipped)

    def _swept(self, host: str, frame: Frame) -> None:
        count = _number(frame, "count")
        self._journal.event("swept", host=host, count=count)
        if count:
            self._show.say(f"{host}: swept {count} leftover processes")

    def _note(self, text: str) -> None:
        self._journal.event("note", text=text)
        self._show.say(text)

    def _task(self, host: str, frame: Frame) -> TaskId:
        try:
            task = TaskId.parse(_text(frame, "task"))
        except ValueError as error:
            raise WireError(str(error)) from error
        if (task, host) not in self._owners:
            raise WireError(f"{task} is not a task of {host}")
        return task


def _waiting(event: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a task says it waits for, reduced to what is valid; None if nothing is."""
    waiting = event.get("waiting")
    if not isinstance(waiting, dict):
        return None
    ranks = waiting.get("for")
    known = [r for r in ranks if isinstance(r, int)] if isinstance(ranks, list) else []
    return {**waiting, "for": known}


def _of_host(host: str, text: str) -> str:
    """``h1: text``; a warning still begins with "warning: "."""
    warning = "warning: "
    rest = text.removeprefix(warning)
    return f"{host}: {text}" if rest == text else f"{warning}{host}: {rest}"


def _intrusion(frame: Frame) -> str:
    who = "another process"
    if isinstance(frame.get("pid"), int):
        who = f"pid {frame['pid']}"
    elif isinstance(frame.get("uid"), int):
        who = f"a process of uid {frame['uid']}"
    return f"its port {frame.get('port')} is held by {who}"


def _text(frame: Frame, key: str) -> str:
    value = frame.get(key)
    if not isinstance(value, str):
        raise WireError(f"{frame['type']}: {key} must be a string")
    return value


def _number(frame: Frame, key: str) -> int:
    value = frame.get(key)
    if not isinstance(value, int):
        raise WireError(f"{frame['type']}: {key} must be a number")
    return value


def _seconds(value: object) -> float:
    """A duration from an agent's frame; 0 if it is not a valid one."""
    return float(value) if isinstance(value, int | float) and value >= 0 else 0.0
