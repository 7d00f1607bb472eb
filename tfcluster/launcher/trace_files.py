"""The files with the tasks' own trace events, in the run's folder.

Each task has a file of whole lines. When it is full, it becomes the older one of two
files, so that the newest events are kept. A separate thread writes, so that a slow disk
delays nothing else.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

from tfcluster.record.files import open_private, write_all
from tfcluster.record.paths import FOLDER_MODE, RunPaths
from tfcluster.task_id import TaskId

FILE_BYTES = 8 << 20
"""The size limit of each of a task's two files: about 200,000 events."""

_KEPT = ("first", "last", "base_us", "names", "events")


class TraceFiles:
    """The files of one run. No file becomes larger than ``limit_bytes``."""

    def __init__(self, paths: RunPaths, limit_bytes: int = FILE_BYTES) -> None:
        self._paths = paths
        self._limit_bytes = limit_bytes
        self._queue: SimpleQueue[tuple[TaskId, bytes] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.trouble: str | None = None
        """Why something could not be written; None if everything was."""

    def add(
        self, task: TaskId, attempt: int, host: str, batch: Mapping[str, Any]
    ) -> None:
        """Queue a batch that a task has sent, which may be anything; never blocks."""
        kept = {key: batch[key] for key in _KEPT if key in batch}
        line = {"attempt": attempt, "host": host, **kept}
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._write, name="traces", daemon=True
            )
            self._thread.start()
        text = json.dumps(line, separators=(",", ":"))
        self._queue.put((task, text.encode() + b"\n"))

    def close(self, timeout_s: float) -> None:
        """Write what is queued; give up after ``timeout_s``."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)

    def _write(self) -> None:
        open_files: dict[TaskId, tuple[int, int]] = {}
        try:
            while (item := self._queue.get()) is not None:
                task, line = item
                try:
                    self._append(open_files, task, line)
                except OSError as error:
                    self.trouble = f"{self._paths.trace(task)}: {error.strerror}"
        finally:
            for descriptor, _ in open_files.values():
                os.close(descriptor)

    def _append(
        self, files: dict[TaskId, tuple[int, int]], task: TaskId, line: bytes
    ) -> None:
        path = self._paths.trace(task)
        descriptor, size = files.pop(task, (-1, 0))
        if descriptor >= 0 and size + len(line) > self._limit_bytes:
            os.close(descriptor)
            descriptor, size = -1, 0
            path.replace(self._paths.older_trace(task))
        if descriptor < 0:
            path.parent.mkdir(FOLDER_MODE, exist_ok=True)
            descriptor = open_private(path, os.O_WRONLY | os.O_APPEND)
        files[task] = descriptor, size + len(line)
        write_all(descriptor, line)
