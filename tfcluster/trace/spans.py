"""What a viewer draws (spans and moments, in rows of processes), and its file. Pure.

The file has Chrome's trace event format, in its JSON object form, which is described in
"Trace Event Format" by Google; Perfetto reads it, too. Times are in microseconds since
the epoch, by the launcher's clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time."""

    row: str
    name: str
    began_us: int
    ended_us: int
    args: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that took no time, or whose end is unknown."""

    row: str
    name: str
    at_us: int
    args: Mapping[str, object] = field(default_factory=dict)


Item = Span | Moment


@dataclass(frozen=True, slots=True)
class Process:
    """What a viewer shows together: the launcher, a host or a task."""

    name: str
    items: tuple[Item, ...]
    label: str = ""
    """Text beside the name."""


def lanes(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """The spans of a row, sorted by beginning, each with the number of its lane.

    In a lane, two spans do not overlap, or one contains the other: viewers cannot draw
    anything else.
    """
    open_ends: list[list[int]] = []
    """For each lane, the ends of the spans that may contain the next span."""
    for span in sorted(spans, key=lambda span: (span.began_us, -span.ended_us)):
        for ends in open_ends:
            while ends and ends[-1] <= span.began_us:
                ends.pop()
        fitting = (
            number
            for number, ends in enumerate(open_ends)
            if not ends or span.ended_us <= ends[-1]
        )
        number = next(fitting, len(open_ends))
        if number == len(open_ends):
            open_ends.append([])
        open_ends[number].append(span.ended_us)
        yield number, span


def pieces(
    processes: Iterable[Process], start_us: int, facts: Mapping[str, object]
) -> Iterator[str]:
    """The text of the file. Times become relative to ``start_us``; earlier ones, 0.

    ``facts`` are shown with the whole trace.
    """
    head = json.dumps({"displayTimeUnit": "ms", "otherData": facts})
    yield head.removesuffix("}") + ', "traceEvents": ['
    between = "\n"
    for pid, process in enumerate(processes, 1):
        for event in _events(process, pid, start_us):
            yield between + json.dumps(event, separators=(",", ":"))
            between = ",\n"
    yield "\n]}\n"


def _events(process: Process, pid: int, start_us: int) -> Iterator[dict[str, Any]]:
    yield _named("process_name", pid, 0, name=process.name)
    yield _named("process_sort_index", pid, 0, sort_index=pid)
    if process.label:
        yield _named("process_labels", pid, 0, labels=process.label)
    threads: dict[tuple[str, int], int] = {}
    for row in dict.fromkeys(item.row for item in process.items):
        spans = [e for e in process.items if isinstance(e, Span) and e.row == row]
        moments = [e for e in process.items if isinstance(e, Moment) and e.row == row]
        threads.setdefault((row, 0), len(threads) + 1)
        for lane, span in lanes(spans):
            tid = threads.setdefault((row, lane), len(threads) + 1)
            yield {
                "name": span.name,
                "cat": row,
                "ph": "X",
                "ts": max(span.began_us, start_us) - start_us,
                "dur": max(span.ended_us, start_us) - max(span.began_us, start_us),
                "pid": pid,
                "tid": tid,
                "args": span.args,
            }
        for moment in moments:
            yield {
                "name": moment.name,
                "cat": row,
                "ph": "i",
                "s": "t",
                "ts": max(moment.at_us, start_us) - start_us,
                "pid": pid,
                "tid": threads[row, 0],
                "args": moment.args,
            }
    for (row, lane), tid in threads.items():
        name = f"{row} ({lane + 1})" if lane else row
        yield _named("thread_name", pid, tid, name=name)
        yield _named("thread_sort_index", pid, tid, sort_index=tid)


def _named(what: str, pid: int, tid: int, **args: object) -> dict[str, Any]:
    return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}
