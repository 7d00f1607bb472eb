"""Copies of logs from hosts whose files we cannot see, made from the lines they send.

The complete log stays where the task ran; a copy says where lines are missing. A
separate thread writes the copies, so that a slow disk delays nothing else.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

from tfcluster.record.files import open_private, write_all
from tfcluster.task_id import TaskId


class LogCopies:
    """The copies of one run, in its folder of logs."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._queue: SimpleQueue[tuple[TaskId, bytes] | None] = SimpleQueue()
        self._files: dict[TaskId, int] = {}
        self._thread: threading.Thread | None = None
        self.trouble: str | None = None
        """Why a copy could not be written; None if all copies were."""

    def add(self, task: TaskId, lines: Sequence[str], *, skipped: int, at: str) -> None:
        """Queue lines; never blocks. ``skipped`` earlier lines are only on ``at``."""
        text = "".join(f"{line}\n" for line in lines)
        if skipped:
            log = self._logs / task.log_name
            text = f"---- {skipped} lines are only in {at}:{log} ----\n{text}"
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._write, name="log copies", daemon=True
            )
            self._thread.start()
        self._queue.put((task, text.encode("utf-8", "surrogateescape")))

    def close(self, timeout_s: float) -> None:
        """Write what is queued; give up after ``timeout_s``."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout_s)

    def _write(self) -> None:
        with contextlib.ExitStack() as stack:
            while (item := self._queue.get()) is not None:
                task, data = item
                try:
                    if task not in self._files:
                        self._files[task] = self._open(task)
                        stack.callback(os.close, self._files[task])
                    write_all(self._files[task], data)
                except OSError as error:
                    self.trouble = f"{self._logs / task.log_name}: {error.strerror}"

    def _open(self, task: TaskId) -> int:
        return open_private(self._logs / task.log_name, os.O_WRONLY | os.O_APPEND)
