"""The event stream as bytes: one JSON object per line, with ``t`` and ``type``.

``docs/record.md`` lists the events. This module knows only their outer form, and that
the last line may be incomplete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tfcluster.protocol.wire import loads

Event = dict[str, Any]

_TAIL_BYTES = 1 << 16


def encode(event: Mapping[str, Any]) -> bytes:
    """The line for an event that has its ``t`` (Unix time).

    Bytes that were not UTF-8 survive as ``\\udcXX`` escapes.
    """
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
    """All events so far; [] if there is no file."""
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
        """The events whose lines were completed since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return decode(data[:end].splitlines())
