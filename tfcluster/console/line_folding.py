"""Shows a line that several ranks print once, so that a run looks like one machine's.

The first rank's lines are shown at once. A line of another rank is left out if the
first rank has printed an equal one; otherwise it waits for a moment, since the first
rank may be about to print it. Pure: the caller has the clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from tfcluster.base.light_dataclasses import dataclass
from tfcluster.base.vocabulary import RANKED_TYPES
from tfcluster.console.text import is_rank

WAIT_S = 1.0
"""How long a line waits for an equal one of the first rank."""
_REMEMBERED = 5_000
_WAITING = 1_000
"""The largest number of lines of a rank that wait."""


@dataclass(slots=True)
class Shown:
    """Lines to show now, from ``task`` and ``also`` other ranks."""

    task: str
    also: int
    lines: list[str]


class LineFolding:
    """Chooses what to show of the lines of ``tasks``, whose names begin with a type."""

    def __init__(self, tasks: Iterable[str]) -> None:
        ranks = [task for task in tasks if is_rank(task)]
        self.first = min(ranks, key=_place) if len(ranks) > 1 else None
        """The rank whose lines are shown at once; None: those of all are."""
        self._recent: OrderedDict[str, str] = OrderedDict()
        """The latest lines that were shown, and by which rank; the latest one last."""
        self._waiting: dict[str, OrderedDict[str, float]] = {}
        """By rank: its waiting lines, and when each came."""

    def add(self, task: str, lines: Sequence[str], now_s: float) -> list[Shown]:
        """What to show once ``task`` has printed ``lines``."""
        if self.first is None or not is_rank(task):
            return [Shown(task, 0, list(lines))] if lines else []
        return _joined(self._added(task, lines, now_s))

    def due(self, now_s: float) -> list[Shown]:
        """The lines that have waited long enough, and are shown now."""
        return _joined(
            shown
            for task, waiting in list(self._waiting.items())
            if waiting and next(iter(waiting.values())) + WAIT_S <= now_s
            for shown in self._released(task)
        )

    def rest(self, task: str | None = None) -> list[Shown]:
        """The lines of ``task``, or of all ranks, that wait; they are shown now."""
        tasks = list(self._waiting) if task is None else [task]
        return _joined(shown for one in tasks for shown in self._released(one))

    def _added(self, task: str, lines: Sequence[str], now_s: float) -> Iterator[Shown]:
        for line in lines:
            if task == self.first:
                yield Shown(task, self._claimed(line, task), [line])
            elif self._recent.get(line, task) == task:
                waiting = self._waiting.setdefault(task, OrderedDict())
                if line in waiting:
                    # Equal lines of one rank are not folded: they are news.
                    yield from self._released(task)
                waiting[line] = now_s
                if len(waiting) > _WAITING:
                    yield from self._released(task)

    def _released(self, task: str) -> Iterator[Shown]:
        """Show all waiting lines of ``task``: later ones must not wait alone."""
        waiting = self._waiting.get(task, OrderedDict())
        while waiting:
            line, _ = waiting.popitem(last=False)
            yield Shown(task, self._claimed(line, task), [line])

    def _claimed(self, line: str, task: str) -> int:
        """Remember a line that is shown; the number of ranks for which it waits."""
        self._recent[line] = task
        self._recent.move_to_end(line)
        if len(self._recent) > _REMEMBERED:
            self._recent.popitem(last=False)
        waiting_ranks = [
            waiting for waiting in self._waiting.values() if line in waiting
        ]
        for waiting in waiting_ranks:
            del waiting[line]
        return len(waiting_ranks)


def _place(rank: str) -> tuple[int, int]:
    kind, _, index = rank.partition(":")
    return RANKED_TYPES.index(kind), int(index) if index.isdecimal() else 0


def _joined(shown: Iterable[Shown]) -> list[Shown]:
    """Join adjacent lines of the same ranks."""
    return [
        Shown(*ranks, [line for part in parts for line in part.lines])
        for ranks, parts in groupby(shown, key=lambda part: (part.task, part.also))
    ]
