"""Writes the metrics of a run, bounded in size, in a separate thread.

Metrics are worth less than the run: when the disk is slow or full, or a line cannot be
written for another reason, lines are lost, and nothing else happens.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from queue import Queue
from typing import Any

from tfcluster.record import events
from tfcluster.record.files import open_private, write_all
from tfcluster.record.metrics import SAMPLE, series_of, thinned
from tfcluster.record.paths import RunPaths

FIRST_INTERVAL_S = 1.0
_MOST_WAITING = 64
"""The most batches of lines that wait for a slow disk; further batches are lost."""

_Lines = Sequence[Mapping[str, Any]]


class MetricsWriter:
    """Appends to ``metrics.ndjson``. Its methods do not wait for the disk.

    ``most`` is the largest number of lines of a series. ``interval_s`` is the time
    between two samples; it is doubled whenever the samples are thinned.
    """

    def __init__(
        self, paths: RunPaths, most: int, *, interval_s: float = FIRST_INTERVAL_S
    ) -> None:
        self._path = paths.metrics
        self._most = most
        self._interval_s = interval_s
        self._due_s = 0.0
        self._held_back: tuple[float, Mapping[str, Mapping[str, Any]]] | None = None
        self._written: dict[str, Mapping[str, Any]] = {}
        self._queue: Queue[_Lines | None] = Queue()
        self._lengths: Counter[tuple[str, str]] = Counter()
        self._thread: threading.Thread | None = None

    def sample(self, t_s: float, tasks: Mapping[str, Mapping[str, Any]]) -> None:
        """Record what tasks do and use at a Unix time, if a sample is due.

        A task whose values have not changed is left out.
        """
        if t_s < self._due_s:
            self._held_back = t_s, tasks
            return
        self._due_s = t_s + self._interval_s - 0.1  # the caller's clock is not exact
        self._held_back = None
        self._put_samples(t_s, tasks)

    def add(self, line: Mapping[str, Any]) -> None:
        """Record a line of another type, which has ``t``, ``type`` and ``task``."""
        self._put([line])

    def flush(self) -> None:
        """Wait until the lines so far are written, or lost."""
        self._queue.join()

    def close(self, timeout_s: float) -> None:
        """Write what is left; give up after ``timeout_s``."""
        if self._held_back is not None:
            self._put_samples(*self._held_back)
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)

    def _put_samples(self, t_s: float, tasks: Mapping[str, Mapping[str, Any]]) -> None:
        news = {task: v for task, v in tasks.items() if v != self._written.get(task)}
        self._written.update(news)
        stamp = {"t": round(t_s, 3), "type": SAMPLE}
        self._put([{**stamp, "task": task, **values} for task, values in news.items()])

    def _put(self, lines: _Lines) -> None:
        if not lines or self._queue.qsize() >= _MOST_WAITING:
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._write, name="metrics", daemon=True
            )
            self._thread.start()
        self._queue.put(lines)

    # --- the thread ------------------------------------------------------------------

    def _write(self) -> None:
        while (lines := self._queue.get()) is not None:
            try:
                # Not only disk errors: if the thread ended, flush() would hang.
                with contextlib.suppress(Exception):
                    self._append(lines)
            finally:
                self._queue.task_done()

    def _append(self, lines: _Lines) -> None:
        data = b"".join(map(events.encode, lines))
        descriptor = open_private(self._path, os.O_RDWR | os.O_APPEND)
        try:
            # After a full disk, the last line may be incomplete.
            write_all(descriptor, events.mend(descriptor) + data)
        finally:
            os.close(descriptor)
        self._lengths.update(map(series_of, lines))
        if any(length > self._most for length in self._lengths.values()):
            self._thin()

    def _thin(self) -> None:
        kept = thinned(events.read_events(self._path), self._most)
        beside = self._path.with_name(f".{self._path.name}.new")
        beside.unlink(missing_ok=True)
        descriptor = open_private(beside, os.O_WRONLY | os.O_EXCL)
        try:
            write_all(descriptor, b"".join(map(events.encode, kept)))
        finally:
            os.close(descriptor)
        beside.replace(self._path)
        before, self._lengths = self._lengths, Counter(map(series_of, kept))
        if any(
            series[0] == SAMPLE and self._lengths[series] < length
            for series, length in before.items()
        ):
            self._interval_s *= 2
