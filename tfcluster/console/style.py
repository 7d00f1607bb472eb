"""Colours, where they are wanted, and the prefix of a task's lines.

All it needs to know about a stream is whether it is a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TextIO

from tfcluster.light_dataclasses import dataclass
from tfcluster.vocabulary import TASK_TYPES

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
        """The prefix of the lines of a task, and of ``also`` others.

        ``worker:1 | ``, ``worker:0 +2 | ``.
        """
        text = f"{task} +{also}" if also else task
        return self._paint(text.ljust(self.width), _colour(task)) + " | "

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

    def _paint(self, text: str, colour: int) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self.colours and text else text


PLAIN = Style()


def style_of(
    stream: TextIO | None,
    environ: Mapping[str, str],
    tasks: Iterable[str] = (),
    colours: bool | None = None,
) -> Style:
    """The style for a stream.

    If ``colours`` is None, colours are used on a terminal unless NO_COLOR is set.
    """
    if colours is None:
        colours = is_terminal(stream, environ) and not environ.get("NO_COLOR")
    return Style(
        colours=colours,
        width=max(map(len, tasks), default=0),
    )


def is_terminal(stream: TextIO | None, environ: Mapping[str, str]) -> bool:
    """Whether the stream is a terminal on which lines can be redrawn."""
    if stream is None or environ.get("TERM") == "dumb":
        return False
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def _colour(task: str) -> int:
    """The task's colour, which is the same in every run."""
    kind, _, index = task.partition(":")
    first = TASK_TYPES.index(kind) if kind in TASK_TYPES else 0
    number = int(index) if index.isdecimal() else 0
    return _PALETTE[(first + number) % len(_PALETTE)]
