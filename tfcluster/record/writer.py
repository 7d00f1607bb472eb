"""Writes the launcher's events and progress, in a separate thread.

A slow, full or vanished disk never blocks the caller: events that cannot be written
wait in memory up to a limit; beyond it, they are lost and counted. Knows nothing about
the meaning of events, except that ``end`` must not be lost.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from tfcluster.errors import ResourceError
from tfcluster.record import events
from tfcluster.record.files import open_private, replace_json
from tfcluster.record.paths import RunPaths

_WAITING_BYTES = 4 << 20
_RETRY_S = 1.0


class Writer:
    """Appends to ``events.jsonl`` and replaces ``progress.json`` of one run.

    Methods may be called from any thread and do not wait for the disk, except
    ``flush`` and ``close``, which wait at most ``timeout_s``.
    """

    def __init__(
        self, paths: RunPaths, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Raises ResourceError if the event file cannot be opened."""
        self._paths = paths
        self._clock = clock
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._progress: dict[str, Any] | None = None
        self._appended = 0
        self._settled = 0  # written, or failed
        self._lost = 0
        self._unreported = 0
        self._trouble: str | None = None
        self._closing = False
        try:
            self._descriptor = open_private(paths.events, os.O_RDWR | os.O_APPEND)
            self._rest = events.mend(self._descriptor)
        except OSError as error:
            raise ResourceError(
                f"cannot write {paths.events}: {error.strerror}"
            ) from error
        self._thread = threading.Thread(
            target=self._write_until_closed, name="record", daemon=True
        )
        self._thread.start()

    @property
    def lost(self) -> int:
        """How many events were lost."""
        with self._changed:
            return self._lost

    @property
    def trouble(self) -> str | None:
        """Why the last attempt to write failed; None if it succeeded."""
        with self._changed:
            return self._trouble

    def append(self, event: Mapping[str, Any]) -> events.Event:
        """Record that ``event`` (with its ``type``) happened now.

        Returns the event with its time ``t``, as readers will see it.
        """
        stamped = {"t": round(self._clock(), 6), **event}
        line = events.encode(stamped)
        with self._changed:
            full = self._waiting_bytes + len(line) > _WAITING_BYTES
            if self._closing or (full and event.get("type") != "end"):
                self._lost += 1
                self._unreported += 1
                return stamped
            self._lines.append(line)
            self._waiting_bytes += len(line)
            self._appended += 1
            self._changed.notify_all()
        return stamped

    def progress(self, tasks: Mapping[str, Mapping[str, Any]]) -> None:
        """Record how far the tasks are, which is also the launcher's heartbeat.

        Only the latest progress is written, so this may be called at any rate.
        """
        with self._changed:
            self._progress = {"t": round(self._clock(), 3), "tasks": dict(tasks)}
            self._appended += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything so far is written.

        Returns False if that took too long or failed (see ``trouble``).
        """
        with self._changed:
            wanted = self._appended
            done = self._changed.wait_for(lambda: self._settled >= wanted, timeout_s)
            return done and self._trouble is None

    def close(self, timeout_s: float) -> bool:
        """Write the rest and end the thread. Returns False if events were lost."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self.lost == 0

    # --- the thread ------------------------------------------------------------------

    def _write_until_closed(self) -> None:
        while self._wait_for_work():
            self._write_once()
        self._write_once()  # a last attempt to write what is left
        if self._lines:
            self._write_once()  # and the note about what was lost
        with self._changed:
            self._lost += self._rest.count(b"\n")
        with contextlib.suppress(OSError):
            os.fsync(self._descriptor)
        os.close(self._descriptor)

    def _write_once(self) -> None:
        with self._changed:
            taken = self._appended
            batch = b"".join(self._lines)
            self._lines.clear()
            progress, self._progress = self._progress, None
        trouble = self._write(batch) or self._replace_progress(progress)
        with self._changed:
            self._waiting_bytes = len(self._rest) + sum(map(len, self._lines))
            self._trouble = trouble
            self._settled = taken
            if not trouble and self._unreported:
                self._own_up()
            self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        """Wait until there is something to write. Returns False to end."""
        with self._changed:
            while not (self._lines or self._progress):
                if self._closing:
                    return False
                self._changed.wait(_RETRY_S if self._rest else None)
                if self._rest and not self._closing:
                    return True
            return True

    def _write(self, batch: bytes) -> str | None:
        """Write what is waiting; keep the rest for the next time."""
        self._rest += batch
        try:
            while self._rest:
                self._rest = self._rest[os.write(self._descriptor, self._rest) :]
        except OSError as error:
            return f"{self._paths.events}: {error.strerror}"
        return None

    def _replace_progress(self, progress: dict[str, Any] | None) -> str | None:
        if progress is None:
            return None
        try:
            # No fsync: the next progress follows within a second.
            replace_json(self._paths.progress, progress, durable=False)
        except OSError as error:
            return f"{self._paths.progress}: {error.strerror}"
        return None

    def _own_up(self) -> None:
        """Record that events were lost, once there is room again."""
        text = f"{self._unreported} events could not be recorded"
        self._unreported = 0
        note = {"t": round(self._clock(), 6), "type": "note", "text": text}
        line = events.encode(note)
        self._lines.append(line)
        self._waiting_bytes += len(line)
