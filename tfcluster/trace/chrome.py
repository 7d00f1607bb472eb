"""Writes processes in Chrome's trace event format, its JSON object form. Pure.

The format is described in "Trace Event Format" by Google; Perfetto reads it, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tfcluster.trace.spans import Moment, Process, Span, lanes


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
