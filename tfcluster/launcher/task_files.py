"""Files in the run's folder that hold what tasks have sent: log copies and traces.

A separate thread writes each kind, so that a slow disk delays nothing else.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

from tfcluster.base.light_dataclasses import as_dict
from tfcluster.base.task_id import TaskId
from tfcluster.protocol.task_events import TraceMessage
from tfcluster.record.files import open_private, write_all
from tfcluster.record.paths import FOLDER_MODE, RunPaths

TRACE_BYTES = 8 << 20
"""The size limit of each of a task's two trace files: about 200,000 events."""


class _TaskFiles:
    def __init__(self, path: Callable[[TaskId], Path]) -> None:
        self._path = path
        self._queue: SimpleQueue[tuple[TaskId, bytes] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._trouble: str | None = None

    def close(self, timeout_s: float) -> str | None:
        """Write what is queued; returns why something could not be, or None."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)
        return self._trouble

    def _make_room(self, task: TaskId, size: int) -> bool:
        """Whether a new file must be begun before one grows to ``size`` bytes."""
        return False

    def _put(self, task: TaskId, data: bytes) -> None:
        if self._thread is None:
            name = type(self).__name__
            self._thread = threading.Thread(target=self._write, name=name, daemon=True)
            self._thread.start()
        self._queue.put((task, data))

    def _write(self) -> None:
        files: dict[TaskId, tuple[int, int]] = {}
        try:
            while (item := self._queue.get()) is not None:
                task, data = item
                try:
                    self._append(files, task, data)
                except OSError as error:
                    self._trouble = f"{self._path(task)}: {error.strerror}"
        finally:
            for descriptor, _ in files.values():
                os.close(descriptor)

    def _append(
        self, files: dict[TaskId, tuple[int, int]], task: TaskId, data: bytes
    ) -> None:
        descriptor, size = files.get(task, (-1, 0))
        if descriptor >= 0 and self._make_room(task, size + len(data)):
            os.close(descriptor)
            del files[task]
            descriptor, size = -1, 0
        if descriptor < 0:
            path = self._path(task)
            path.parent.mkdir(FOLDER_MODE, exist_ok=True)
            descriptor = open_private(path, os.O_WRONLY | os.O_APPEND)
        files[task] = descriptor, size + len(data)
        write_all(descriptor, data)


class LogCopies(_TaskFiles):
    """Copies of logs from hosts whose files we cannot see, from the lines they send."""

    def __init__(self, paths: RunPaths) -> None:
        super().__init__(paths.log)

    def add(self, task: TaskId, lines: Sequence[str], *, skipped: int, at: str) -> None:
        text = "".join(f"{line}\n" for line in lines)
        if skipped:
            log = self._path(task)
            text = f"---- {skipped} lines are only in {at}:{log} ----\n{text}"
        self._put(task, text.encode("utf-8", "surrogateescape"))


class TraceFiles(_TaskFiles):
    """The tasks' own trace events, of which ``limit_bytes`` or more are kept."""

    def __init__(self, paths: RunPaths, limit_bytes: int = TRACE_BYTES) -> None:
        super().__init__(paths.trace)
        self._older = paths.older_trace
        self._limit_bytes = limit_bytes

    def add(self, task: TaskId, attempt: int, host: str, batch: TraceMessage) -> None:
        line = {"attempt": attempt, "host": host, **as_dict(batch)}
        self._put(task, json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def _make_room(self, task: TaskId, size: int) -> bool:
        if size <= self._limit_bytes:
            return False
        self._path(task).replace(self._older(task))
        return True
