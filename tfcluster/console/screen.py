"""Shows the output of a run: logs on stdout, messages and live text on stderr.

No method blocks, whatever state the terminal is in. Knows nothing about runs.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TextIO

from tfcluster.base.light_dataclasses import dataclass
from tfcluster.console.display import DEFAULT, Display, is_terminal, style_of
from tfcluster.console.sanitise import sanitise, sanitise_word, settle
from tfcluster.console.text import cut, plural, width


class Stream:
    """A standard stream, perhaps None; one that is closed discards everything."""

    def __init__(self, file: TextIO | None, environ: Mapping[str, str]) -> None:
        self._file = file
        self.descriptor = _descriptor(file)
        self.is_terminal = self.descriptor is not None and is_terminal(file, environ)
        self.closed = file is None
        self._encoding = getattr(file, "encoding", None) or "utf-8"

    def same_as(self, other: Stream) -> bool:
        """Whether both go to the same place, so that their order matters."""
        if self.descriptor is None or other.descriptor is None:
            return self._file is other._file
        ours, theirs = os.fstat(self.descriptor), os.fstat(other.descriptor)
        return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)

    def size(self) -> tuple[int, int]:
        """The current columns and lines of the terminal; (80, 24) if unknown."""
        columns = lines = 0
        if self.descriptor is not None:
            with contextlib.suppress(OSError):
                columns, lines = os.get_terminal_size(self.descriptor)
        return columns or 80, lines or 24

    def write(self, text: str) -> None:
        """Write all of ``text``, or set ``closed`` if nobody reads it any more."""
        if self.closed or not text:
            return
        try:
            if self.descriptor is None and self._file is not None:
                self._file.write(text)
                self._file.flush()
            elif self.descriptor is not None:
                data = text.encode(self._encoding, errors="backslashreplace")
                _write_all(self.descriptor, data)
        except (OSError, ValueError):
            # The reader is gone (EPIPE), the terminal hung up (EIO), or the disk is
            # full (ENOSPC): losing the echo must not end the run.
            self.closed = True


def _descriptor(file: TextIO | None) -> int | None:
    if file is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        file.flush()  # earlier output must come first
    try:
        return file.fileno()
    except (io.UnsupportedOperation, AttributeError, ValueError):
        return None


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            # Another process that shares the terminal has made it non-blocking.
            select.select([], [descriptor], [])


MAX_LINES = 10_000
MAX_CHARACTERS = 8 << 20
MAX_TALK = 10_000

_BATCH = 256
_DRAW_S = 0.1
"""The shortest interval at which live text is drawn."""


@dataclass(slots=True)
class _Entry:
    """A text; or, with neither text nor lines, the number of lines not shown here."""

    stream: Stream
    text: str
    lines: int = 0
    """The number of log lines; 0 for a message."""
    dropped: int = 0


class WriterThread:
    """Writes entries in order, with the live text below the last one."""

    def __init__(self, live_on: Stream | None, name: str) -> None:
        """``live_on`` is the terminal that shows live text; None: no live text."""
        self._changed = threading.Condition()
        self._entries: deque[_Entry] = deque()
        self._log_lines = 0
        self._log_characters = 0
        self._dropping = False
        self._live: str | None = None
        self._closing = False
        self._painter = _Painter(live_on) if live_on else None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put_log(
        self,
        stream: Stream,
        lines: Sequence[str],
        render: Callable[[], str],
        *,
        skipped: int = 0,
    ) -> None:
        """Queue log lines if there is room; ``skipped`` before them are missing."""
        with self._changed:
            if self._closing or stream.closed:
                return
            if self._has_room(len(lines), sum(map(len, lines))):
                entry = _Entry(stream, render(), lines=len(lines))
                self._entries.append(entry)
                self._log_lines += entry.lines
                self._log_characters += len(entry.text)
            else:
                self._drop(stream, len(lines) + skipped)
            self._changed.notify()

    def put(self, stream: Stream, text: str) -> None:
        """Queue a message; unlike log lines, it has room even in a full queue."""
        with self._changed:
            if self._closing or stream.closed:
                return
            if len(self._entries) >= MAX_LINES + MAX_TALK:
                self._drop(stream, text.count("\n"))
            else:
                self._entries.append(_Entry(stream, text))
            self._changed.notify()

    def show(self, live: str | None) -> None:
        """Keep this text below everything else; None: no text."""
        with self._changed:
            self._live = live
            self._changed.notify()

    def close(self, deadline_s: float) -> bool:
        """Write what is queued; False if that took longer than ``deadline_s``."""
        with self._changed:
            self._closing = True
            self._live = None
            self._changed.notify()
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _has_room(self, lines: int, characters: int) -> bool:
        # Once lines are dropped, let half of the queue drain first: one long gap is
        # easier to read than a thousand short ones.
        share = 2 if self._dropping else 1
        self._dropping = (
            self._log_lines + lines > MAX_LINES // share
            or self._log_characters + characters > MAX_CHARACTERS // share
        ) and self._log_lines > 0
        return not self._dropping

    def _drop(self, stream: Stream, count: int) -> None:
        last = self._entries[-1] if self._entries else None
        if last is None or not last.dropped or last.stream is not stream:
            last = _Entry(stream, "")
            self._entries.append(last)
        last.dropped += count

    def _next_batch(self) -> list[tuple[Stream, str]]:
        batch = []
        for _ in range(min(_BATCH, len(self._entries))):
            entry = self._entries.popleft()
            if entry.lines:
                self._log_lines -= entry.lines
                self._log_characters -= len(entry.text)
            if entry.dropped:
                lines = plural(entry.dropped, "line")
                entry.text = f"… {lines} not shown, see the log files\n"
            batch.append((entry.stream, entry.text))
        return batch

    def _work(self) -> None:
        painter, ended = self._painter, False
        while not ended:
            with self._changed:
                while not (self._entries or self._closing):
                    pause_s = painter.pause_s(self._live) if painter else None
                    if pause_s is not None and pause_s <= 0:
                        break
                    self._changed.wait(pause_s)
                pieces, live = self._next_batch(), self._live
                ended = self._closing and not self._entries
            if painter:
                pieces = painter.around(pieces, live)
            # Adjacent pieces of a stream become one write.
            for stream, group in groupby(pieces, key=lambda piece: piece[0]):
                stream.write("".join(text for _, text in group))


class _Painter:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._drawn: tuple[str, ...] = ()
        self._text: str | None = None
        self._drawn_s = 0.0

    def pause_s(self, text: str | None) -> float | None:
        """How long to wait before ``text`` is drawn; None if it has been drawn."""
        if text == self._text:
            return None
        return self._drawn_s + _DRAW_S - time.monotonic()

    def around(
        self, pieces: list[tuple[Stream, str]], text: str | None
    ) -> list[tuple[Stream, str]]:
        """``pieces``, with the old text erased before them and the new drawn after."""
        columns, lines = self._stream.size()
        erase = self._erase(columns)
        self._text, self._drawn_s = text, time.monotonic()
        shown = text.split("\n")[: max(1, lines - 1)] if text else []
        self._drawn = tuple(cut(line, columns - 1) for line in shown)
        return [(self._stream, erase), *pieces, (self._stream, "\n".join(self._drawn))]

    def _erase(self, columns: int) -> str:
        if not self._drawn:
            return ""
        # A terminal that has become narrower has wrapped our lines.
        rows = sum(max(1, -(-width(line) // columns)) for line in self._drawn)
        return "\r\x1b[K" + "\x1b[A\x1b[K" * (rows - 1)


LINE_CHARACTERS = 16 << 10
PLAIN_LIVE_S = 10.0
"""The shortest time between lines of live text where nothing can be redrawn."""

_NUMBERS = re.compile(r"[\d.,:%]+")


class Screen:
    """The only screen of a process; methods may be called from any thread."""

    def __init__(
        self,
        out: TextIO | None,
        err: TextIO | None,
        *,
        environ: Mapping[str, str],
        tasks: Iterable[str] = (),
        display: Display = DEFAULT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The prefixes of ``tasks`` are padded to the same width."""
        tasks = tuple(tasks)
        self._out, self._err = Stream(out, environ), Stream(err, environ)
        self._display = display
        self._out_style = style_of(out, environ, tasks, display.colours)
        self.style = style_of(err, environ, tasks, display.colours)
        """The style for views that are shown here."""
        self._plain = None if self._err.is_terminal else _PlainLive(clock)
        terminal = self._err if self._err.is_terminal else None
        self._talk = WriterThread(terminal, "console")
        shared = self._out.same_as(self._err)
        self._logs = self._talk if shared else WriterThread(None, "console-logs")

    def log(
        self, task: str, lines: Sequence[str], *, skipped: int = 0, also: int = 0
    ) -> None:
        """Show raw lines, which ``also`` others print, after ``skipped`` ones."""
        name = self._out_style.prefix(sanitise_word(task), also)
        prefix = self._display.stamp(time.time()) + name

        def render() -> str:
            gap = f"… {plural(skipped, 'line')} not shown, see its log file"
            text = [prefix + gap] if skipped else []
            for line in lines:
                shown = sanitise(settle(line.rstrip("\r")))
                if len(shown) > LINE_CHARACTERS:
                    shown = shown[:LINE_CHARACTERS] + "…"
                text += [prefix + part for part in shown.split("\n")]
            return "\n".join(text) + "\n" if text else ""

        self._logs.put_log(self._out, lines, render, skipped=skipped)

    def say(self, text: str) -> None:
        self._talk.put(self._err, sanitise(text) + "\n")

    def error(self, lines: Sequence[str]) -> None:
        """Show an error, as returned by ``TfclusterError.lines()``."""
        shown = [self._marked(sanitise(line)) for line in lines]
        self._talk.put(self._err, "\n".join(shown) + "\n")

    def show(self, lines: Sequence[str]) -> None:
        if lines:
            self._talk.put(self._err, "\n".join(lines) + "\n")

    def live(self, text: str | None) -> None:
        """Keep this text below everything else until it changes; None: no text.

        Where nothing can be redrawn, it becomes a plain line at most every ten seconds,
        and only if more than its numbers changed.
        """
        if self._plain is None:
            self._talk.show(sanitise(text) if text else None)
        elif text and self._plain.is_news(text):
            self.say(text)

    def close(self, deadline_s: float) -> bool:
        """Write what is queued; False if that took longer than ``deadline_s``."""
        until_s = time.monotonic() + deadline_s
        done = self._talk.close(deadline_s)
        return self._logs.close(max(0.0, until_s - time.monotonic())) and done

    def _marked(self, line: str) -> str:
        for word, paint in (
            ("error:", self.style.red),
            ("warning:", self.style.yellow),
        ):
            if line.startswith(word):
                return paint(word) + line[len(word) :]
        return line


class _PlainLive:
    """Decides which live texts are worth a line, say in the log of a CI job."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._meaning = ""
        self._next_s = clock() + PLAIN_LIVE_S

    def is_news(self, text: str) -> bool:
        meaning = _NUMBERS.sub("#", text)
        if self._clock() < self._next_s or meaning == self._meaning:
            return False
        self._meaning = meaning
        self._next_s = self._clock() + PLAIN_LIVE_S
        return True
