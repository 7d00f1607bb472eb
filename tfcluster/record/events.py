"""The event stream: lines of JSON with ``t`` and ``type``, reader and writer.

``docs/record.md`` lists the events. The last line may be incomplete, values may be
malformed, and ``end`` must not be lost.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tfcluster.base.errors import ResourceError
from tfcluster.protocol.wire import loads
from tfcluster.record.files import open_private, replace_json
from tfcluster.record.paths import RunPaths

Event = dict[str, Any]

_TAIL_BYTES = 1 << 16


def encode(event: Mapping[str, Any]) -> bytes:
    """The line of an event that has its Unix time ``t``."""
    return json.dumps(event, separators=(",", ":"), default=str).encode() + b"\n"


def decode(lines: Iterable[bytes]) -> list[Event]:
    """The events of complete lines; lines that are not events are skipped."""
    events = []
    for line in lines:
        try:
            event = loads(line)
        except ValueError:
            continue
        if (
            isinstance(event, dict)
            and isinstance(event.get("type"), str)
            and isinstance(event.get("t"), (int, float))
        ):
            events.append(event)
    return events


def mend(descriptor: int) -> bytes:
    """What must precede the next line: a newline if a dead writer left half a line."""
    size = os.lseek(descriptor, 0, os.SEEK_END)
    if size and os.pread(descriptor, 1, size - 1) != b"\n":
        return b"\n"
    return b""


def read_events(path: Path) -> list[Event]:
    return EventReader(path).read()


def read_ends(path: Path) -> list[Event]:
    """The first event and those of the last 64 KiB: enough for the state of a run."""
    try:
        with path.open("rb") as file:
            first = file.readline(_TAIL_BYTES)
            size = file.seek(0, os.SEEK_END)
            start = max(len(first), size - _TAIL_BYTES)
            file.seek(start)
            tail = file.read(_TAIL_BYTES).split(b"\n")
    except OSError:
        return []
    torn_head = 1 if start > len(first) else 0
    return decode([first, *tail[torn_head:-1]])


class EventReader:
    """Reads a stream that may still grow."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[Event]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return decode(data[:end].splitlines())


Json = Mapping[str, Any]

_LIMIT = 2**63


def text(source: Json, key: str) -> str | None:
    value = source.get(key)
    return value if isinstance(value, str) else None


def integer(source: Json, key: str) -> int | None:
    """An integer of at most 64 bits, or None."""
    value = source.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if -_LIMIT <= value < _LIMIT else None


def number(source: Json, key: str) -> float | None:
    """A finite number (JSON has no others), or None."""
    value = source.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the range of floats
        return None


_READERS = {"str": text, "int": integer, "float": number}


@cache
def _fields_with_readers(kind: type) -> dict[str, Callable[[Json, str], Any]]:
    return {
        name: _READERS[annotation.removesuffix(" | None")]
        for name, annotation in kind.__annotations__.items()
        if annotation.removesuffix(" | None") in _READERS
    }


def facts(kind: type, source: Json) -> dict[str, Any]:
    """The texts and numbers in ``source`` for fields of a class, by name."""
    readers = _fields_with_readers(kind).items()
    values = {name: read(source, name) for name, read in readers}
    return {name: value for name, value in values.items() if value is not None}


def objects(source: Json, key: str) -> list[Json]:
    value = source.get(key)
    if not isinstance(value, list):
        return []
    return [entry for entry in value if isinstance(entry, Mapping)]


def metric_values(metrics: Any) -> dict[str, float | None]:
    """Losses and metrics by name; a value that is not a number is None."""
    if not isinstance(metrics, Mapping):
        return {}
    return {str(name): number(metrics, name) for name in metrics}


_WAITING_BYTES = 4 << 20
_RETRY_S = 1.0


class Writer:
    """Appends to ``events.jsonl`` and replaces ``progress.json`` of one run.

    Events that cannot be written wait in memory up to a limit; beyond it, they are lost
    and counted. Methods may be called from any thread, and only ``flush`` and ``close``
    wait for the disk, at most ``timeout_s``.
    """

    def __init__(
        self, paths: RunPaths, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Raises ResourceError if the event file cannot be opened."""
        self._paths = paths
        self._clock = clock
        self._changed = threading.Condition()
        self._progress: dict[str, Any] | None = None
        self._appended = 0
        self._settled = 0  # written, or failed
        self._lost = 0
        self._unreported = 0
        self._trouble: str | None = None
        self._closing = False
        try:
            self._descriptor = open_private(paths.events, os.O_RDWR | os.O_APPEND)
            self._waiting = bytearray(mend(self._descriptor))
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
        with self._changed:
            return self._lost

    @property
    def trouble(self) -> str | None:
        """Why the last attempt to write failed; None if it succeeded."""
        with self._changed:
            return self._trouble

    def append(self, event: Mapping[str, Any]) -> Event:
        """Record that ``event`` happened now; returns it with its time ``t``."""
        stamped = {"t": round(self._clock(), 6), **event}
        line = encode(stamped)
        with self._changed:
            full = len(self._waiting) + len(line) > _WAITING_BYTES
            if self._closing or (full and event.get("type") != "end"):
                self._lost += 1
                self._unreported += 1
                return stamped
            self._waiting += line
            self._appended += 1
            self._changed.notify_all()
        return stamped

    def progress(self, tasks: Mapping[str, Mapping[str, Any]]) -> None:
        """Record how far the tasks are, and our heartbeat; the latest is written."""
        with self._changed:
            self._progress = {"t": round(self._clock(), 3), "tasks": dict(tasks)}
            self._appended += 1
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is written; False: too slow, or ``trouble``."""
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

    def _write_until_closed(self) -> None:
        closing = False
        while not closing:
            with self._changed:
                if self._waiting and self._trouble and not self._closing:
                    self._changed.wait(_RETRY_S)
                else:
                    self._changed.wait_for(
                        lambda: self._waiting or self._progress or self._closing
                    )
                closing = self._closing
            self._write_once()
        if self._waiting:
            self._write_once()  # the note about what was lost
        with self._changed:
            self._lost += self._waiting.count(b"\n")
        with contextlib.suppress(OSError):
            os.fsync(self._descriptor)
        os.close(self._descriptor)

    def _write_once(self) -> None:
        with self._changed:
            taken, lines = self._appended, bytes(self._waiting)
            progress, self._progress = self._progress, None
        written, trouble = self._write(lines)
        trouble = trouble or self._replace_progress(progress)
        with self._changed:
            del self._waiting[:written]
            self._trouble, self._settled = trouble, taken
            if not trouble and self._unreported:
                # There is room again.
                text = f"{self._unreported} events could not be recorded"
                self._unreported = 0
                note = {"t": round(self._clock(), 6), "type": "note", "text": text}
                self._waiting += encode(note)
            self._changed.notify_all()

    def _write(self, lines: bytes) -> tuple[int, str | None]:
        written = 0
        try:
            while written < len(lines):
                written += os.write(self._descriptor, lines[written:])
        except OSError as error:
            return written, f"{self._paths.events}: {error.strerror}"
        return written, None

    def _replace_progress(self, progress: dict[str, Any] | None) -> str | None:
        try:
            if progress is not None:
                # No fsync: the next progress follows within a second.
                replace_json(self._paths.progress, progress, durable=False)
        except OSError as error:
            return f"{self._paths.progress}: {error.strerror}"
        return None
