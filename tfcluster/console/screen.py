"""Shows the output of a run: logs on stdout, messages and live text on stderr.

No method blocks, whatever state the terminal is in. Knows nothing about runs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TextIO

from tfcluster.console.display import DEFAULT, Display, style_of
from tfcluster.console.sanitise import sanitise, sanitise_word, settle
from tfcluster.console.text import plural
from tfcluster.console.writer_thread import Stream, WriterThread

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
