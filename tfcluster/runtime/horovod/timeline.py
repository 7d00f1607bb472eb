"""Records the exchanges and their times in a file for Chrome's trace viewer.

``start_timeline`` and ``stop_timeline`` are functions of Horovod. They are called on
every rank, but only rank 0 writes.
"""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path

from tfcluster.runtime import process_group


class Timeline:
    """The exchanges of this rank that have not been written yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._events: list[dict[str, object]] = []

    def add(self, what: str, start_s: float, end_s: float) -> None:
        """Record the exchange ``what``; start and end are in seconds."""
        verb, _, name = what.partition(" of ")
        self._events.append(
            {
                "name": what,
                "cat": verb,
                "ph": "X",
                "pid": os.getpid(),
                "tid": name or verb,
                "ts": start_s * 1e6,
                "dur": (end_s - start_s) * 1e6,
            }
        )

    def write(self) -> None:
        """Write all events as JSON in Chrome's trace event format."""
        self._path.write_text(json.dumps(self._events), encoding="utf-8")


_timeline: Timeline | None = None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record exchanges from now on; ``stop_timeline`` or the exit writes the file.

    Rank 0 writes ``file_path`` in Chrome's Trace Event Format (times in microseconds,
    by the group's clock); other ranks do nothing. ``mark_cycles``
    is ignored: there are no cycles. Raises ValueError if a timeline is already being
    recorded, OSError if the file cannot be written, CollectiveError before ``init``.
    Follows ``start_timeline`` of horovod/common/basics.py.
    """
    global _timeline
    if _timeline is not None:
        raise ValueError("a timeline is already being written: call stop_timeline")
    if not process_group.is_chief():
        return
    _timeline = Timeline(Path(file_path))
    _timeline.write()
    process_group.group().observe(_timeline.add)
    atexit.register(stop_timeline)


def stop_timeline() -> None:
    """Write the file and stop recording. Does nothing without a timeline.

    Raises OSError if the file cannot be written.
    """
    global _timeline
    if _timeline is None:
        return
    if process_group.is_initialized():
        process_group.group().observe(None)
    _timeline.write()
    _timeline = None
    atexit.unregister(stop_timeline)
