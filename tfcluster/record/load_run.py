"""A run as it stands, from its folder: the record folded, and the launcher looked for.

Only reads; a folder that is damaged or vanishes meanwhile gives what is left of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tfcluster.record import events
from tfcluster.record.files import read_json
from tfcluster.record.liveness import Life, judge, judged, signs
from tfcluster.record.paths import RunPaths
from tfcluster.record.replay import fold
from tfcluster.record.run_status import RunView


def read_run(paths: RunPaths, *, now_s: float) -> RunView:
    """Everything about the run. ``now_s``: seconds since the epoch."""

    def read() -> RunView:
        plan = read_json(paths.plan) or {}
        found = events.read_events(paths.events)
        return fold(plan, found, read_json(paths.progress))

    return _judged(paths, read, now_s)


def read_summary(paths: RunPaths, *, now_s: float) -> RunView:
    """How the run stands, in a time that does not grow with its length.

    Of its tasks it has only those that were in the news last.
    """
    return _judged(paths, lambda: fold({}, events.read_ends(paths.events)), now_s)


def _judged(paths: RunPaths, read: Callable[[], RunView], now_s: float) -> RunView:
    view = _named(read(), paths)
    if view.state.final:
        return view
    if view.launcher is None and paths.job.exists():
        return view  # a job waits for its hosts: only its scheduler knows
    found = signs(paths, view.launcher)
    verdict = judge(found, known=view.launcher is not None, now_s=now_s)
    if verdict.life is Life.DEAD:
        # It may have ended well between our two looks: the end is written before the
        # lock falls, so it is there by now.
        view = _named(read(), paths)
    return judged(view, verdict)


def _named(view: RunView, paths: RunPaths) -> RunView:
    """What the folder's name says holds even where nothing can be read."""
    return replace(view, run=paths.run, name=view.name or paths.name)
