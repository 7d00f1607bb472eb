"""Which lines of the tasks' output the console shows. Log files have every line.

A line that several ranks print is shown once, so that a run looks like one machine's.
The first rank's lines are shown at once. A line of another rank is left out if the
first rank has printed an equal one; otherwise it waits for a moment, since the first
rank may be about to print it. Pure: the caller has the clock.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    return [
        Shown(*ranks, [line for part in parts for line in part.lines])
        for ranks, parts in groupby(shown, key=lambda part: (part.task, part.also))
    ]


# How log lines of TensorFlow's C++ code begin: I0000 00:00:1795394395.891576 ...
_NATIVE = re.compile(
    r"[IWEF]\d{4} \d\d:\d\d:|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWEF] "
)
_BEFORE_NATIVE = "WARNING: All log messages before absl::InitializeLog() is called"
_GPU_SEARCH = re.compile(
    r"failed call to cuInit|Could not find cuda drivers|"
    r"Cannot dlopen some GPU libraries|Unable to register cu\w+ factory|"
    r"computation placer already registered|Could not find TensorRT"
)
_OURS = re.compile(
    r"(?:CollectiveError|CollectiveMismatchError|CollectiveTimeoutError|PeerLostError|"
    r"NotDistributedError): "
)
# Lines that follow such a line: a traceback that is part of TensorFlow's message.
_OF_DUMP = re.compile(
    r"\s|$|The above exception was|During handling of|"
    r"(?:[A-Za-z_]\w*\.)+\w*(?:Error|Exception)\b"
)
_TRACEBACK = "Traceback (most recent call last):"


HasGpus = Callable[[str], bool | None]
"""Whether a task has GPUs; None: unknown."""


class Echo:
    """Filters the output of all tasks; takes each task's lines in order."""

    def __init__(self, has_gpus: HasGpus, *, everything: bool = False) -> None:
        self._has_gpus = has_gpus
        self._everything = everything
        self._dumping: set[str] = set()
        self._held: dict[str, str] = {}
        """By task: a "Traceback" line inside a dump. If the next line is not empty,
        Python's own traceback begins there, which is shown."""

    def chosen(self, task: str, lines: Sequence[str]) -> Sequence[str]:
        if self._everything:
            return lines
        shown: list[str] = []
        for line in lines:
            held = self._held.pop(task, None)
            if held is not None and line.strip():
                # Empty lines separate the lines of a dump: this is its end.
                self._dumping.discard(task)
                shown.append(held)
            if self._is_wanted(task, line):
                shown.append(line)
        return shown

    def _is_wanted(self, task: str, line: str) -> bool:
        if line.startswith(_BEFORE_NATIVE):
            return False
        if _NATIVE.match(line):
            self._dumping.discard(task)
            if _OURS.search(line):
                # Python reports the same error later, with the program's line.
                self._dumping.add(task)
                return False
            return not (_GPU_SEARCH.search(line) and self._has_gpus(task) is False)
        if task in self._dumping:
            if line.startswith(_TRACEBACK):
                self._held[task] = line
                return False
            if _OF_DUMP.match(line):
                return False
            self._dumping.discard(task)
        return True
