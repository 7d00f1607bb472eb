"""Loads the state of a run: replays its record, and checks its launcher.

Only reads; from a damaged or vanishing folder it returns what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tfcluster.base.light_dataclasses import replace
from tfcluster.base.states import RunState
from tfcluster.record import events
from tfcluster.record.continuation import successor
from tfcluster.record.files import read_json
from tfcluster.record.liveness import by_signs, holder, signs
from tfcluster.record.paths import RunPaths
from tfcluster.record.replay import Replay, replay
from tfcluster.record.run_status import RunView


def read_run(paths: RunPaths, *, now_s: float) -> RunView:
    """Everything about the run. ``now_s`` is the Unix time."""
    return RunReader(paths).read(now_s=now_s)


class RunReader:
    """``read_run`` again and again; each time it reads only the newest events."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._plan: Mapping[str, Any] | None = None

    def read(self, *, now_s: float) -> RunView:
        return _shown(self._paths, self._view, now_s)

    def _view(self) -> RunView:
        plan = read_json(self._paths.plan) or {}
        if plan != self._plan:
            # Tasks may have changed: all events are about those of the new plan.
            self._plan, self._replay = plan, Replay(plan)
            self._events = events.EventReader(self._paths.events)
        for event in self._events.read():
            self._replay.add(event)
        view = self._replay.view(read_json(self._paths.progress))
        after = successor(self._paths) if view.state.final else None
        return replace(view, continued_as=after.run) if after else view


def read_summary(paths: RunPaths, *, now_s: float) -> RunView:
    """The state of the run and its latest tasks, however long it has run."""
    return _shown(paths, lambda: replay({}, events.read_ends(paths.events)), now_s)


def _shown(paths: RunPaths, read: Callable[[], RunView], now_s: float) -> RunView:
    view = _named(read(), paths)
    if view.state.final:
        return view
    if view.launcher is None and paths.job.exists():
        return view  # its job is queued: only the scheduler knows its state
    observed = signs(paths, view.launcher or holder(paths))
    shown = by_signs(view, observed, now_s=now_s)
    if shown.state is RunState.LOST:
        # The run may have ended properly after we read its events: the launcher writes
        # the end before it releases the lock, so the end is there now.
        shown = by_signs(_named(read(), paths), observed, now_s=now_s)
    return shown


def _named(view: RunView, paths: RunPaths) -> RunView:
    """Take id and name from the folder's name, in case nothing could be read."""
    return replace(view, run=paths.run, name=view.name or paths.name)


def gpus_of_tasks(paths: RunPaths) -> Callable[[str], bool | None]:
    """Whether a task had GPUs, by its name; None: unknown."""
    plan = read_json(paths.plan) or {}
    counts = {host["host"]: host.get("gpus") for host in plan.get("hosts", ())}
    tasks = {entry["task"]: entry for entry in plan.get("tasks", ())}

    def has_gpus(task: str) -> bool | None:
        entry = tasks.get(task, {})
        if entry.get("env", {}).get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            return False
        count = counts.get(entry.get("host"))
        return None if count is None else count > 0

    return has_gpus
