"""Which parts of a run are displayed, in which colours, with which prefixes. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import TextIO

from tfcluster.base.light_dataclasses import dataclass
from tfcluster.base.vocabulary import TASK_TYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Display:
    quiet: bool = False
    """Show only warnings, errors and the result: no task output, no progress."""
    everything: bool = False
    """Show lines that are usually left out, too."""
    timestamps: bool = False
    """Begin each line of a task with the time at which it is displayed."""
    colours: bool | None = None
    """Whether to use colours; None: on a terminal, unless NO_COLOR is set."""

    def stamp(self, now_s: float) -> str:
        if not self.timestamps:
            return ""
        clock = time.strftime("%H:%M:%S", time.localtime(now_s))
        return f"{clock}.{int(now_s % 1 * 1000):03d} "


def is_debugging(environ: Mapping[str, str]) -> bool:
    """Whether TFCLUSTER_DEBUG asks for lines that are otherwise left out."""
    return environ.get("TFCLUSTER_DEBUG", "") not in ("", "0")


DEFAULT = Display()

# Cyan, yellow, green, magenta, blue, and their bright forms; red is for failures.
_PALETTE = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_BOLD, _DIM, _RED, _GREEN, _YELLOW = 1, 2, 31, 32, 33


@dataclass(frozen=True, slots=True)
class Style:
    """How to mark text; without colours every method returns its argument."""

    colours: bool = False
    width: int = 0
    """The columns of the longest task name."""

    def prefix(self, task: str, also: int = 0) -> str:
        """The prefix of lines: ``worker:1 | ``, with others ``worker:0 +2 | ``."""
        text = f"{task} +{also}" if also else task
        return self._paint(text.ljust(self.width), _colour(task)) + " | "

    def header(self, *names: str) -> list[str]:
        return list(map(self.dim, names))

    def bold(self, text: str) -> str:
        return self._paint(text, _BOLD)

    def dim(self, text: str) -> str:
        return self._paint(text, _DIM)

    def red(self, text: str) -> str:
        return self._paint(text, _RED)

    def green(self, text: str) -> str:
        return self._paint(text, _GREEN)

    def yellow(self, text: str) -> str:
        return self._paint(text, _YELLOW)

    def by_state(self, state: object, text: str) -> str:
        """``text`` in the colour of a state of a run or task."""
        if str(state) in ("failed", "lost"):
            return self.red(text)
        return self.green(text) if str(state) == "succeeded" else text

    def _paint(self, text: str, colour: int) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self.colours and text else text


PLAIN = Style()


def style_of(
    stream: TextIO | None,
    environ: Mapping[str, str],
    tasks: Iterable[str] = (),
    colours: bool | None = None,
) -> Style:
    if colours is None:
        colours = is_terminal(stream, environ) and not environ.get("NO_COLOR")
    return Style(colours=colours, width=max(map(len, tasks), default=0))


def is_terminal(stream: TextIO | None, environ: Mapping[str, str]) -> bool:
    """Whether the stream is a terminal on which lines can be redrawn."""
    if stream is None or environ.get("TERM") == "dumb":
        return False
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def _colour(task: str) -> int:
    kind, _, index = task.partition(":")
    first = TASK_TYPES.index(kind) if kind in TASK_TYPES else 0
    number = int(index) if index.isdecimal() else 0
    return _PALETTE[(first + number) % len(_PALETTE)]
