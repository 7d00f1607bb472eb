"""Console lines that wait for the channel, in a bounded queue that counts drops.

The capture thread fills it, the loop's thread empties it. Does not know how frames are
encoded.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from tfcluster.agent.constants import LOG_FRAME_BYTES, LOG_QUEUE_BYTES
from tfcluster.light_dataclasses import dataclass, field

_LINE_COST = 64


Source = tuple[str, int]
"""The task that wrote the output, and its attempt."""


@dataclass(slots=True)
class Chunk:
    """Lines of one source; ``dropped`` lines came before them."""

    source: Source
    lines: list[str] = field(default_factory=list)
    dropped: int = 0
    dropped_bytes: int = 0
    cost: int = 0


class ConsoleQueue:
    """A queue that drops its oldest lines when it is full, but keeps their number."""

    def __init__(self, limit: int = LOG_QUEUE_BYTES) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._chunks: deque[Chunk] = deque()
        self._cost = 0
        self._drops: dict[Source, tuple[int, int]] = {}

    def put(self, source: Source, lines: Sequence[str]) -> None:
        """Queue lines, oldest first."""
        with self._lock:
            for line in lines:
                self._append(source, line)
            while self._cost > self._limit:
                self._forget_oldest()

    def drop(self, source: Source, lines: int, count_bytes: int) -> None:
        """Count lines as dropped, after all lines that were put so far."""
        if lines or count_bytes:
            with self._lock:
                self._add_drops(source, lines, count_bytes)

    def settle(self, source: Source) -> bool:
        """Queue the count of drops that no line follows; returns if there was one."""
        with self._lock:
            if source not in self._drops:
                return False
            self._begin(source)
            return True

    def take(self) -> Chunk | None:
        """The oldest lines, as many as fit into a frame; None if there are none."""
        with self._lock:
            if not self._chunks:
                return None
            chunk = self._chunks.popleft()
            self._cost -= chunk.cost
            return chunk

    def _append(self, source: Source, line: str) -> None:
        chunk = self._chunks[-1] if self._chunks else None
        fits = chunk is not None and chunk.source == source
        if chunk is None or not fits or source in self._drops or self._full(chunk):
            chunk = self._begin(source)
        chunk.lines.append(line)
        chunk.cost += len(line) + _LINE_COST
        self._cost += len(line) + _LINE_COST

    @staticmethod
    def _full(chunk: Chunk) -> bool:
        return chunk.cost >= LOG_FRAME_BYTES

    def _begin(self, source: Source) -> Chunk:
        dropped, dropped_bytes = self._drops.pop(source, (0, 0))
        chunk = Chunk(source, [], dropped, dropped_bytes, cost=_LINE_COST)
        self._cost += chunk.cost
        self._chunks.append(chunk)
        return chunk

    def _forget_oldest(self) -> None:
        old = self._chunks.popleft()
        self._cost -= old.cost
        lines = old.dropped + len(old.lines)
        count_bytes = old.dropped_bytes + sum(
            len(line.encode("utf-8", "surrogateescape")) + 1 for line in old.lines
        )
        heir = next((c for c in self._chunks if c.source == old.source), None)
        if heir is None:
            self._add_drops(old.source, lines, count_bytes)
        else:
            heir.dropped += lines
            heir.dropped_bytes += count_bytes

    def _add_drops(self, source: Source, lines: int, count_bytes: int) -> None:
        before = self._drops.get(source, (0, 0))
        self._drops[source] = (before[0] + lines, before[1] + count_bytes)
