"""A job that starts again continues as another run; files link the two runs.

In the folder of a run, ``next.json`` names the run after it. ``previous.json`` names
the run before it and has the restarts that count towards ``restart.max``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfcluster.base.light_dataclasses import dataclass
from tfcluster.record.events import integer, number, read_ends, text
from tfcluster.record.files import read_json, replace_json
from tfcluster.record.paths import RunPaths, runs

_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class Earlier:
    """What has happened in the runs that a run continues."""

    run: str | None = None
    """The run before this one; None: this run is the first one."""
    requeues: int = 0
    """How often the job has been requeued after its time limit."""
    restarts: tuple[float, ...] = ()
    """Unix times of the restarts that count, including requeues."""

    def counted(self, now_s: float, within_s: float | None) -> tuple[float, ...]:
        if within_s is None:
            return self.restarts
        return tuple(t_s for t_s in self.restarts if now_s - t_s < within_s)


def link(before: RunPaths, after: RunPaths) -> None:
    """Record that ``after`` continues ``before``. Raises OSError."""
    left = _left_by(before)
    content = {"requeues": left.requeues, "restarts": list(left.restarts)}
    replace_json(after.previous, {"run": before.run, **content})
    if before.root.is_dir():
        replace_json(before.next, {"run": after.run})


def earlier(paths: RunPaths) -> Earlier:
    content = read_json(paths.previous)
    if content is None:
        return Earlier()
    return Earlier(
        run=text(content, "run"),
        requeues=integer(content, "requeues") or 0,
        restarts=_times(content),
    )


def successor(paths: RunPaths) -> RunPaths | None:
    """The run that continues this one; None: there is none, or it was removed."""
    after = _beside(paths, text(read_json(paths.next) or {}, "run"))
    return after if after is not None and after.root.is_dir() else None


def latest(paths: RunPaths) -> RunPaths:
    """The last of the runs that continue this run, or this run itself."""
    seen = {paths.run}
    while (after := successor(paths)) is not None and after.run not in seen:
        paths = after
        seen.add(paths.run)
    return paths


def first(paths: RunPaths) -> RunPaths:
    """The first of the runs that this run continues, or this run itself."""
    seen = {paths.run}
    while before := _beside(paths, earlier(paths).run):
        if before.run in seen:
            break
        paths = before
        seen.add(paths.run)
    return paths


def find_waiting(state: Path, job: str, name: str) -> RunPaths | None:
    """The run of this name that the requeued ``job`` continues, if there is one."""
    for paths in runs(state):
        if paths.name != name or text(read_json(paths.job) or {}, "job") != job:
            continue
        return paths if _requeued(paths) and successor(paths) is None else None
    return None


def was_requeued(paths: RunPaths) -> bool:
    """Whether the launcher of this run has had its job requeued."""
    return _requeued(paths) is not None


def _beside(paths: RunPaths, run: str | None) -> RunPaths | None:
    if run is None or not _ID.fullmatch(run) or run in (".", ".."):
        return None
    return RunPaths(paths.root.parent / run)


def _left_by(paths: RunPaths) -> Earlier:
    before = earlier(paths)
    event = _requeued(paths)
    if event is None:
        return before
    count = integer(event, "count") or before.requeues + 1
    return Earlier(run=before.run, requeues=count, restarts=_times(event))


def _requeued(paths: RunPaths) -> Mapping[str, Any] | None:
    for event in reversed(read_ends(paths.events)):
        if event["type"] == "requeued":
            return None if text(event, "refused") else event
    return None


def _times(source: Mapping[str, Any]) -> tuple[float, ...]:
    entries = source.get("restarts")
    values = entries if isinstance(entries, list) else []
    times = (number({"t": value}, "t") for value in values)
    return tuple(t_s for t_s in times if t_s is not None)
