"""Lines of output for the launcher's console: splits, limits and queues them."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence

from tfcluster.base.light_dataclasses import dataclass, field

_LINE_BYTES = 16 << 10
_CONSOLE_BYTES_PER_S = 1 << 20
_LEAST_LINE_BYTES = 512  # so that at most 2048 lines pass in a second
UPDATE_INTERVAL_S = 0.5  # between two updates of a progress bar (lines that end in \r)
_LOG_QUEUE_BYTES = 4 << 20
_LOG_FRAME_BYTES = 48 << 10  # before JSON escapes of up to 12 bytes per character
_TAIL_LINES = 20
_TAIL_CHARS = 2000


def visible(line: bytes, limit: int) -> bytes:
    """What a terminal shows of a line with ``\\r`` in it, cut to ``limit`` bytes."""
    return shorten(line.rstrip(b"\r").rpartition(b"\r")[2], limit)


def shorten(line: bytes, limit: int) -> bytes:
    """At most ``limit`` bytes, without an incomplete UTF-8 character at the end."""
    if len(line) <= limit:
        return line
    end = limit
    while end > limit - 4 and line[end] & 0xC0 == 0x80:
        end -= 1
    return line[:end]


def decoded(line: bytes) -> str:
    """Bytes as text; what is not UTF-8 becomes ``\\xNN``."""
    return line.decode("utf-8", "backslashreplace")


class ConsoleLines:
    """Lines of one stream; of ``\\r`` updates, only one is shown per interval."""

    def __init__(
        self, limit: int = _LINE_BYTES, interval_s: float = UPDATE_INTERVAL_S
    ) -> None:
        self._limit = limit
        self._interval_s = interval_s
        self._rest = b""  # the unfinished line; its final \r may be half of a \r\n
        self._update: bytes | None = None
        self._updated = -interval_s

    def feed(self, data: bytes, room: int) -> tuple[list[bytes], int]:
        """The lines that ``data`` completes, at most ``room``, and how many more."""
        lines: list[bytes] = []
        begin, dropped = 0, 0
        while (end := data.find(b"\n", begin)) >= 0 and len(lines) < room:
            lines.append(visible(self._rest + data[begin:end], self._limit))
            self._rest, self._update = b"", None
            begin = end + 1
        if end >= 0:
            last = data.rfind(b"\n") + 1
            dropped = data.count(b"\n", begin, last)
            self._rest, self._update = b"", None
            begin = last
        self._keep(data[begin:])
        return lines, dropped

    def _keep(self, data: bytes) -> None:
        if not data:
            return
        text = self._rest + data
        head, _, last = text.rstrip(b"\r").rpartition(b"\r")
        self._update = visible(head, self._limit) or self._update
        # One byte over the limit lets `shorten` see where the last character ends.
        self._rest = last[: self._limit + 1] + b"\r" * text.endswith(b"\r")

    def update(self, now: float) -> bytes | None:
        """The newest update of a progress bar if it is time to show one, else None."""
        if now - self._updated < self._interval_s:
            return None
        if self._rest.endswith(b"\r"):
            self._update, self._rest = self._rest[:-1] or self._update, b""
        shown, self._update = self._update, None
        if not shown:
            return None
        self._updated = now
        return visible(shown, self._limit)

    def finish(self) -> bytes | None:
        """At the end of the stream: the unfinished line, or the last update."""
        last = visible(self._rest, self._limit) or self._update
        self._rest, self._update = b"", None
        return visible(last, self._limit) if last else None


class Tail:
    """The last lines of a stream, as a terminal shows them, in bounded memory."""

    def __init__(self, count: int = _TAIL_LINES, chars: int = _TAIL_CHARS) -> None:
        self._count = count
        self._chars = chars
        self._limit = 4 * chars  # a character has at most four bytes
        self._end = b""

    def feed(self, data: bytes) -> None:
        self._end = (self._end + data)[-self._count * self._limit :]

    def lines(self) -> list[str]:
        lines = [visible(line, self._limit) for line in self._end.split(b"\n")]
        if not lines[-1]:
            lines.pop()
        return [decoded(line)[: self._chars] for line in lines[-self._count :]]


class Budget:
    """Limits the rate of bytes, with a burst of one second. A line has a least cost."""

    def __init__(
        self, per_s: float = _CONSOLE_BYTES_PER_S, least: int = _LEAST_LINE_BYTES
    ) -> None:
        self._per_s = per_s
        self._least = least
        self._credit = per_s
        self._then: float | None = None

    def room(self, now: float) -> int:
        passed_s = 0.0 if self._then is None else now - self._then
        self._then = now
        self._credit = min(self._per_s, self._credit + passed_s * self._per_s)
        return max(0, int(self._credit / self._least))

    def spend(self, lines: Sequence[bytes]) -> None:
        self._credit -= sum(max(len(line), self._least) for line in lines)


_LINE_COST = 64


Source = tuple[str, int]
"""The task that wrote the output, and its attempt."""


@dataclass(slots=True)
class Chunk:
    """Lines of one source; ``dropped`` lines came before them."""

    source: Source
    lines: list[str] = field(default_factory=list)
    dropped: int = 0
    cost: int = 0


class ConsoleQueue:
    """A queue for two threads; full, it drops its oldest lines but counts them."""

    def __init__(self, limit: int = _LOG_QUEUE_BYTES) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._chunks: deque[Chunk] = deque()
        self._cost = 0
        self._drops: Counter[Source] = Counter()

    def put(self, source: Source, lines: Sequence[str]) -> None:
        with self._lock:
            for line in lines:
                self._append(source, line)
            while self._cost > self._limit:
                self._forget_oldest()

    def drop(self, source: Source, lines: int) -> None:
        """Count lines as dropped, after all lines that were put so far."""
        if lines:
            with self._lock:
                self._drops[source] += lines

    def settle(self, source: Source) -> bool:
        """Queue the count of drops that no line follows; returns if there was one."""
        with self._lock:
            if source not in self._drops:
                return False
            self._begin(source)
            return True

    def pop(self) -> Chunk | None:
        """The oldest lines, as many as fit into a frame; None if there are none."""
        with self._lock:
            if not self._chunks:
                return None
            chunk = self._chunks.popleft()
            self._cost -= chunk.cost
            return chunk

    def _append(self, source: Source, line: str) -> None:
        chunk = self._chunks[-1] if self._chunks else None
        if (
            chunk is None
            or chunk.source != source
            or chunk.cost >= _LOG_FRAME_BYTES
            or source in self._drops
        ):
            chunk = self._begin(source)
        chunk.lines.append(line)
        chunk.cost += len(line) + _LINE_COST
        self._cost += len(line) + _LINE_COST

    def _begin(self, source: Source) -> Chunk:
        chunk = Chunk(source, dropped=self._drops.pop(source, 0), cost=_LINE_COST)
        self._cost += chunk.cost
        self._chunks.append(chunk)
        return chunk

    def _forget_oldest(self) -> None:
        old = self._chunks.popleft()
        self._cost -= old.cost
        count = old.dropped + len(old.lines)
        heir = next((c for c in self._chunks if c.source == old.source), None)
        if heir is None:
            self._drops[old.source] += count
        else:
            heir.dropped += count
