"""Computes the current state of a run from its plan and events. Pure.

It cannot know whether the launcher is still alive (see ``liveness``). In malformed
events, a key that is missing or has another type counts as not given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from tfcluster.base.light_dataclasses import replace
from tfcluster.base.states import RunState, TaskState
from tfcluster.record.events import (
    Json,
    facts,
    integer,
    metric_values,
    number,
    objects,
    text,
)
from tfcluster.record.run_status import (
    FailureView,
    FitView,
    HostView,
    LauncherView,
    ResultsView,
    RunView,
    ServingView,
    TaskView,
)

_State = TypeVar("_State", RunState, TaskState)


def replay(plan: Json, events: Iterable[Json], progress: Json | None = None) -> RunView:
    replaying = Replay(plan)
    for event in events:
        replaying.add(event)
    return replaying.view(progress)


class Replay:
    """``replay`` step by step, for callers that get events one by one."""

    def __init__(self, plan: Json) -> None:
        self._tasks = {
            task.task: task for task in map(_planned, objects(plan, "tasks"))
        }
        self._hosts = {
            host: HostView(host=host)
            for host in [text(entry, "host") for entry in objects(plan, "hosts")]
            if host is not None
        }
        self._run = RunView(
            run=text(plan, "run") or "",
            name=text(plan, "name") or "",
            backend=text(plan, "backend"),
        )
        self._failures: list[FailureView] = []
        self._notes: list[str] = []
        self._results: dict[str, ResultsView] = {}

    def add(self, event: Json) -> None:
        handler = getattr(self, f"_on_{event.get('type')}", None)
        if handler:
            handler(event)

    def view(self, progress: Json | None = None) -> RunView:
        steps = progress.get("tasks") if progress else None
        steps = steps if isinstance(steps, Mapping) else {}
        # A failure that a restart recovered from is not a failure of the run.
        overcome = self._run.state is RunState.SUCCEEDED
        return replace(
            self._run,
            first_failure=self._failures[0]
            if self._failures and not overcome
            else None,
            secondary=tuple(self._failures[0 if overcome else 1 :]),
            hosts=tuple(self._hosts.values()),
            tasks=tuple(
                _with_steps(task, steps.get(task.task)) for task in self._tasks.values()
            ),
            notes=tuple(self._notes),
            results=tuple(self._results.values()),
        )

    def _on_run(self, event: Json) -> None:
        started_s = number(event, "started")
        self._run = replace(
            self._run,
            run=text(event, "run") or self._run.run,
            name=text(event, "name") or self._run.name,
            named=event.get("named") is True,
            backend=text(event, "backend") or self._run.backend,
            started_s=number(event, "t") if started_s is None else started_s,
            since_s=number(event, "t"),
            launcher=launcher_in(event),
            follows=text(event, "follows"),
            requeues=integer(event, "requeues") or 0,
        )

    def _on_host(self, event: Json) -> None:
        fields = facts(HostView, event)
        if {"host", "state"} <= fields.keys():
            view = HostView(**fields | {"since_s": number(event, "t")})
            self._hosts[view.host] = view

    def _on_stage(self, event: Json) -> None:
        view = self._hosts.get(text(event, "host") or "")
        if view is not None and view.state == "starting":
            self._hosts[view.host] = replace(
                view, stage=text(event, "stage"), since_s=number(event, "t")
            )

    def _on_task(self, event: Json) -> None:
        name = text(event, "task")
        if name is None:
            return
        old = self._tasks.get(name) or TaskView(task=name)
        attempt = integer(event, "attempt") or 0
        if attempt < old.attempt:
            return  # about an earlier attempt
        if attempt > old.attempt:
            old = TaskView(
                task=name,
                host=old.host,
                address=old.address,
                attempt=attempt,
                log=old.log,
            )
        self._tasks[name] = _advanced(old, event)

    def _on_failure(self, event: Json) -> None:
        tail = event.get("log_tail")
        failure = FailureView(
            **facts(FailureView, event),
            log_tail=tuple(map(str, tail)) if isinstance(tail, list) else (),
        )
        # The first failure is the latest one that is not secondary.
        victim = event.get("secondary") is True
        self._failures.insert(len(self._failures) if victim else 0, failure)

    def _on_state(self, event: Json) -> None:
        state = _state(RunState, event)
        if state is None or self._run.state.final:
            return
        changed = state is not self._run.state
        self._run = replace(
            self._run,
            state=state,
            reason=text(event, "reason") or (None if changed else self._run.reason),
            since_s=number(event, "t") if changed else self._run.since_s,
        )

    def _on_end(self, event: Json) -> None:
        self._run = replace(
            self._run,
            state=_state(RunState, event) or RunState.FAILED,
            reason=text(event, "reason") or self._run.reason,
            since_s=number(event, "t"),
            ended_s=number(event, "t"),
            exit_code=integer(event, "exit_code"),
        )

    def _on_requeued(self, event: Json) -> None:
        asked = text(event, "refused") is None
        self._run = replace(self._run, requeued=asked)

    def _on_swept(self, event: Json) -> None:
        count = integer(event, "count") or 0
        self._run = replace(self._run, swept=self._run.swept + count)

    def _on_results(self, event: Json) -> None:
        view = results_view(event)
        if view.host:
            self._results[view.host] = view

    def _on_note(self, event: Json) -> None:
        if note := text(event, "text"):
            self._notes.append(note)


def launcher_in(source: Json) -> LauncherView | None:
    """The launcher that an event or a lock file names; None if it names none."""
    fields = facts(LauncherView, source)
    return LauncherView(**fields) if len(fields) == 4 else None


def results_view(event: Json) -> ResultsView:
    return ResultsView(
        **facts(ResultsView, event),
        kept=_pairs(event, "kept"),
        growing=_pairs(event, "growing"),
        missed=_pairs(event, "missed"),
    )


def _planned(entry: Json) -> TaskView:
    return TaskView(**{"task": "?"} | facts(TaskView, entry))


def _advanced(old: TaskView, event: Json) -> TaskView:
    """``old`` updated by the event; its state never moves backwards."""
    state = _state(TaskState, event) or old.state
    if old.state.final or state.order < old.state.order:
        state = old.state
    phase = text(event, "phase") or (old.phase if state is old.state else None)
    news = state is not old.state or phase != old.phase
    since_s = number(event, "t") if news else old.since_s
    later = {"state": state, "phase": phase, "since_s": since_s}
    return replace(old, **facts(TaskView, event) | later)


def _with_steps(task: TaskView, steps: Any) -> TaskView:
    if not isinstance(steps, Mapping):
        return task
    serving, fit = steps.get("serving"), facts(FitView, steps)
    return replace(
        task,
        **facts(TaskView, steps),
        serving=ServingView(**facts(ServingView, serving))
        if isinstance(serving, Mapping)
        else None,
        fit=FitView(**fit) if "epoch" in fit else None,
        metrics=metric_values(steps.get("metrics")),
    )


def _pairs(source: Json, key: str) -> tuple[tuple[str, str], ...]:
    value = source.get(key)
    rows = value if isinstance(value, list) else []
    return tuple(
        (str(row[0]), str(row[1]))
        for row in rows
        if isinstance(row, list) and len(row) == 2
    )


def _state(kind: type[_State], event: Json) -> _State | None:
    try:
        return kind(event.get("state"))
    except ValueError:
        return None
