"""Computes the current state of a run from its plan and events. Pure.

``status``, the live view and the tests all use it. It knows no files and no clocks, so
it cannot know whether the launcher is still alive (see ``liveness``). Events may be
malformed: a key that is missing or has another type counts as not given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from tfcluster.light_dataclasses import replace
from tfcluster.record.events import Json, metric_values
from tfcluster.record.events import integer as _integer
from tfcluster.record.events import number as _number
from tfcluster.record.events import objects as _objects
from tfcluster.record.events import text as _text
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
from tfcluster.states import RunState, TaskState

_State = TypeVar("_State", RunState, TaskState)


def replay(plan: Json, events: Iterable[Json], progress: Json | None = None) -> RunView:
    """The state of the run with this plan after these events.

    ``plan`` is the content of ``plan.json``; ``progress`` is that of ``progress.json``.
    """
    replaying = Replay(plan)
    for event in events:
        replaying.add(event)
    return replaying.view(progress)


class Replay:
    """``replay`` step by step, for callers that get events one by one."""

    def __init__(self, plan: Json) -> None:
        self._tasks = {
            task.task: task for task in map(_planned, _objects(plan, "tasks"))
        }
        self._hosts = {
            host: HostView(host=host)
            for host in [_text(entry, "host") for entry in _objects(plan, "hosts")]
            if host is not None
        }
        self._run = RunView(
            run=_text(plan, "run") or "",
            name=_text(plan, "name") or "",
            backend=_text(plan, "backend"),
        )
        self._failures: list[FailureView] = []
        self._notes: list[str] = []
        self._results: dict[str, ResultsView] = {}

    def add(self, event: Json) -> None:
        """Apply the next event; events of unknown types are ignored."""
        handler = _HANDLERS.get(event.get("type", ""))
        if handler:
            handler(self, event)

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

    # --- one method for each type of event -------------------------------------------

    def _on_run(self, event: Json) -> None:
        started_s = _number(event, "started")
        self._run = replace(
            self._run,
            run=_text(event, "run") or self._run.run,
            name=_text(event, "name") or self._run.name,
            named=event.get("named") is True,
            backend=_text(event, "backend") or self._run.backend,
            started_s=_number(event, "t") if started_s is None else started_s,
            since_s=_number(event, "t"),
            launcher=_launcher(event),
            follows=_text(event, "follows"),
            requeues=_integer(event, "requeues") or 0,
        )

    def _on_host(self, event: Json) -> None:
        host, state = _text(event, "host"), _text(event, "state")
        if host is not None and state is not None:
            self._hosts[host] = HostView(
                host=host,
                state=state,
                cause=_text(event, "cause"),
                since_s=_number(event, "t"),
            )

    def _on_stage(self, event: Json) -> None:
        known = self._hosts.get(_text(event, "host") or "")
        if known is not None and known.state == "starting":
            self._hosts[known.host] = replace(
                known, stage=_text(event, "stage"), since_s=_number(event, "t")
            )

    def _on_task(self, event: Json) -> None:
        name = _text(event, "task")
        if name is None:
            return
        old = self._tasks.get(name) or TaskView(task=name)
        attempt = _integer(event, "attempt") or 0
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
            task=_text(event, "task"),
            host=_text(event, "host"),
            exit_code=_integer(event, "exit_code"),
            signal=_text(event, "signal"),
            cause=_text(event, "cause") or "failed",
            log_tail=tuple(map(str, tail)) if isinstance(tail, list) else (),
            log=_text(event, "log"),
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
            reason=_text(event, "reason") or (None if changed else self._run.reason),
            since_s=_number(event, "t") if changed else self._run.since_s,
        )

    def _on_end(self, event: Json) -> None:
        self._run = replace(
            self._run,
            state=_state(RunState, event) or RunState.FAILED,
            reason=_text(event, "reason") or self._run.reason,
            since_s=_number(event, "t"),
            ended_s=_number(event, "t"),
            exit_code=_integer(event, "exit_code"),
        )

    def _on_requeued(self, event: Json) -> None:
        asked = _text(event, "refused") is None
        self._run = replace(self._run, requeued=asked)

    def _on_swept(self, event: Json) -> None:
        count = _integer(event, "count") or 0
        self._run = replace(self._run, swept=self._run.swept + count)

    def _on_results(self, event: Json) -> None:
        view = results_view(event)
        if view.host:
            self._results[view.host] = view

    def _on_note(self, event: Json) -> None:
        if text := _text(event, "text"):
            self._notes.append(text)


_HANDLERS = {
    "run": Replay._on_run,
    "host": Replay._on_host,
    "stage": Replay._on_stage,
    "task": Replay._on_task,
    "failure": Replay._on_failure,
    "state": Replay._on_state,
    "end": Replay._on_end,
    "requeued": Replay._on_requeued,
    "swept": Replay._on_swept,
    "note": Replay._on_note,
    "results": Replay._on_results,
}


def results_view(event: Json) -> ResultsView:
    """What an event ``results`` says."""
    return ResultsView(
        host=_text(event, "host") or "",
        state=_text(event, "state") or "incomplete",
        folder=_text(event, "folder"),
        there=_text(event, "there"),
        kept=_pairs(event, "kept"),
        growing=_pairs(event, "growing"),
        missed=_pairs(event, "missed"),
        cause=_text(event, "cause"),
        **{key: _integer(event, key) or 0 for key in _RESULT_COUNTS},
    )


_RESULT_COUNTS = (
    *("files", "bytes", "fetched", "unchanged", "sent_bytes"),
    "missed_count",
)


def _planned(entry: Json) -> TaskView:
    return TaskView(
        task=_text(entry, "task") or "?",
        host=_text(entry, "host"),
        address=_text(entry, "address"),
        log=_text(entry, "log"),
    )


def _advanced(old: TaskView, event: Json) -> TaskView:
    """``old`` updated by the event; its state never moves backwards."""
    state = _state(TaskState, event) or old.state
    if old.state.final or state.order < old.state.order:
        state = old.state
    phase = _text(event, "phase") or (old.phase if state is old.state else None)
    news = state is not old.state or phase != old.phase
    since_s = _number(event, "t") if news else old.since_s
    given = {key: take(event, key) for key, take in _TASK_FACTS.items()}
    facts: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
    return replace(old, state=state, phase=phase, since_s=since_s, **facts)


def _with_steps(task: TaskView, steps: Any) -> TaskView:
    if not isinstance(steps, Mapping):
        return task
    return replace(
        task,
        step=_integer(steps, "step"),
        steps_per_s=_number(steps, "steps_per_s"),
        wait_share=_number(steps, "wait_share"),
        serving=_serving(steps.get("serving")),
        fit=_fit(steps),
        metrics=metric_values(steps.get("metrics")),
        rss_bytes=_integer(steps, "rss_bytes"),
        cpu_s=_number(steps, "cpu_s"),
    )


def _fit(steps: Json) -> FitView | None:
    epoch = _integer(steps, "epoch")
    if epoch is None:
        return None
    return FitView(
        epoch=epoch,
        epochs=_integer(steps, "epochs"),
        epoch_step=_integer(steps, "epoch_step"),
        epoch_steps=_integer(steps, "epoch_steps"),
    )


def _serving(found: Any) -> ServingView | None:
    if not isinstance(found, Mapping):
        return None
    return ServingView(
        applied=int(_number(found, "applied") or 0),
        dropped=int(_number(found, "dropped") or 0),
        staleness_mean=_number(found, "staleness_mean") or 0.0,
        staleness_max=int(_number(found, "staleness_max") or 0),
        bytes=int(_number(found, "bytes") or 0),
    )


def _launcher(event: Json) -> LauncherView | None:
    pid, start_time = _integer(event, "pid"), _integer(event, "start_time")
    host, boot_id = _text(event, "host"), _text(event, "boot_id")
    if pid is None or start_time is None or host is None or boot_id is None:
        return None
    return LauncherView(pid=pid, host=host, boot_id=boot_id, start_time=start_time)


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


_TASK_FACTS = {
    "host": _text,
    "address": _text,
    "pid": _integer,
    "exit_code": _integer,
    "signal": _text,
    "cause": _text,
    "seconds": _number,
    "log": _text,
}
