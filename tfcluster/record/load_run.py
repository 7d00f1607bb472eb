"""Loads the state of a run: replays its record, and checks its launcher.

Only reads; from a damaged or vanishing folder it returns what is left.
"""

from __future__ import annotations

from collections.abc import Callable

from tfcluster.light_dataclasses import replace
from tfcluster.record import events
from tfcluster.record.continuation import successor
from tfcluster.record.files import read_json
from tfcluster.record.liveness import Life, holder, judge, judged, signs
from tfcluster.record.paths import RunPaths
from tfcluster.record.replay import replay
from tfcluster.record.run_status import RunView


def read_run(paths: RunPaths, *, now_s: float) -> RunView:
    """Everything about the run. ``now_s`` is the Unix time."""

    def read() -> RunView:
        plan = read_json(paths.plan) or {}
        found = events.read_events(paths.events)
        view = replay(plan, found, read_json(paths.progress))
        after = successor(paths) if view.state.final else None
        return replace(view, continued_as=after.run) if after else view

    return _judged(paths, read, now_s)


def read_summary(paths: RunPaths, *, now_s: float) -> RunView:
    """The state of the run, in a time that does not grow with the run's length.

    Has only the tasks that recent events are about.
    """
    return _judged(paths, lambda: replay({}, events.read_ends(paths.events)), now_s)


def _judged(paths: RunPaths, read: Callable[[], RunView], now_s: float) -> RunView:
    view = _named(read(), paths)
    if view.state.final:
        return view
    if view.launcher is None and paths.job.exists():
        return view  # its job is queued: only the scheduler knows its state
    found = signs(paths, view.launcher or holder(paths))
    verdict = judge(found, known=view.launcher is not None, now_s=now_s)
    if verdict.life is Life.DEAD:
        # The run may have ended properly after we read its events: the launcher writes
        # the end before it releases the lock, so the end is there now.
        view = _named(read(), paths)
    return judged(view, verdict)


def _named(view: RunView, paths: RunPaths) -> RunView:
    """Take id and name from the folder's name, in case nothing could be read."""
    return replace(view, run=paths.run, name=view.name or paths.name)
