"""Splits raw output into lines for a console, and keeps the last ones. Pure.

Knows no files and no channel; the time and the number of permitted lines are arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tfcluster.agent.constants import (
    CONSOLE_BYTES_PER_S,
    LINE_BYTES,
    LINES_PER_S,
    TAIL_CHARS,
    TAIL_LINES,
    UPDATE_INTERVAL_S,
)
from tfcluster.light_dataclasses import dataclass, field


@dataclass
class FedLines:
    """Lines to show, and the number of lines after them that only the file gets."""

    lines: list[bytes] = field(default_factory=list)
    dropped: int = 0
    dropped_bytes: int = 0


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


def _kept(text: bytes, limit: int, *, ended: bool) -> bytes:
    """An unfinished line, cut to a bounded length, with the \\r that may end it."""
    # One byte over the limit lets `shorten` see where the last character ends.
    return text[: limit + 1] + b"\r" * ended


class ConsoleLines:
    """Lines of one stream of output.

    ``\\r`` ends a line, too, but such updates replace each other: one is shown per
    interval. An unfinished line is held back, so that it is never shown in two parts.
    """

    def __init__(
        self, limit: int = LINE_BYTES, interval_s: float = UPDATE_INTERVAL_S
    ) -> None:
        self._limit = limit
        self._interval_s = interval_s
        self._rest = b""  # the unfinished line; its final \r may be half of a \r\n
        self._update: bytes | None = None
        self._updated = -interval_s

    def feed(self, data: bytes, room: int) -> FedLines:
        """The lines that ``data`` completes, at most ``room`` of them."""
        fed = FedLines()
        begin = 0
        end = data.find(b"\n")
        while end >= 0 and len(fed.lines) < room:
            fed.lines.append(visible(self._rest + data[begin:end], self._limit))
            self._rest, self._update = b"", None
            begin = end + 1
            end = data.find(b"\n", begin)
        if end >= 0:
            last = data.rfind(b"\n") + 1
            fed.dropped = data.count(b"\n", begin, last)
            fed.dropped_bytes = len(self._rest) + last - begin
            self._rest, self._update = b"", None
            begin = last
        self._keep(data[begin:])
        return fed

    def _keep(self, data: bytes) -> None:
        if not data:
            return
        text = self._rest + data
        head, _, last = text.rstrip(b"\r").rpartition(b"\r")
        self._update = visible(head, self._limit) or self._update
        self._rest = _kept(last, self._limit, ended=text.endswith(b"\r"))

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

    def __init__(self, count: int = TAIL_LINES, chars: int = TAIL_CHARS) -> None:
        self._chars = chars
        self._limit = 4 * chars  # a character has at most four bytes
        self._lines: deque[bytes] = deque(maxlen=count)
        self._rest = b""

    def feed(self, data: bytes) -> None:
        ended = data.rsplit(b"\n", self._lines.maxlen or 1)
        if len(ended) > 1:
            first = self._rest + ended[0]
            # `first` may consist of many lines, of which only the last can matter.
            first = first.rpartition(b"\n")[2]
            self._lines.extend(visible(x, self._limit) for x in [first, *ended[1:-1]])
            self._rest = b""
        text = self._rest + ended[-1]
        last = text.rstrip(b"\r").rpartition(b"\r")[2]
        self._rest = _kept(last, self._limit, ended=text.endswith(b"\r"))

    def lines(self) -> list[str]:
        rest = visible(self._rest, self._limit)
        last: Sequence[bytes] = [*self._lines, rest] if rest else self._lines
        texts = [decoded(line)[: self._chars] for line in last]
        return texts[-(self._lines.maxlen or 1) :]


class Budget:
    """Limits the rates of lines and of bytes, both with a burst of one second."""

    def __init__(
        self, lines_per_s: float = LINES_PER_S, bytes_per_s: float = CONSOLE_BYTES_PER_S
    ) -> None:
        self._rates = (lines_per_s, bytes_per_s)
        self._lines, self._bytes = self._rates
        self._then: float | None = None

    def room(self, now: float) -> int:
        """How many lines may pass now."""
        passed = 0.0 if self._then is None else now - self._then
        self._then = now
        self._lines = min(self._rates[0], self._lines + passed * self._rates[0])
        self._bytes = min(self._rates[1], self._bytes + passed * self._rates[1])
        return max(0, int(self._lines)) if self._bytes > 0 else 0

    def spend(self, lines: Sequence[bytes]) -> None:
        self._lines -= len(lines)
        self._bytes -= sum(map(len, lines))
