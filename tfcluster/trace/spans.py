"""What a viewer draws (spans and moments) of a record, and its file. Pure.

The file has Chrome's trace event format ("Trace Event Format" by Google), which
Perfetto reads, too. Times are microseconds since the epoch, by the launcher's clock.
``docs/record.md`` ("Traces") describes the lines of a task's own trace.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tfcluster.base.states import TaskState
from tfcluster.protocol.wire import loads


@dataclass(frozen=True, slots=True)
class Span:
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
    """The file's text, with times from ``start_us``, and ``facts`` about it."""
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


_MUCH = 4.0
"""A measurement that is this many times less certain than the best one is not used."""
_GOOD_S = 0.001


@dataclass(frozen=True, slots=True)
class HostClock:
    """Ordered pairs of the host's clock and our offset from it, in microseconds."""

    points: tuple[tuple[float, float], ...]
    uncertainty_s: float

    def ours_us(self, theirs_us: int) -> int:
        return math.floor(theirs_us + self._offset_us(theirs_us))

    def _offset_us(self, theirs_us: int) -> float:
        """The offset at a time: clocks drift evenly between two measurements."""
        points = self.points
        after = bisect_right(points, (theirs_us, math.inf))
        if after == 0:
            return points[0][1]
        if after == len(points):
            return points[-1][1]
        (began, first), (ended, second) = points[after - 1], points[after]
        return first + (second - first) * (theirs_us - began) / (ended - began)


def host_clocks(events: Iterable[Mapping[str, Any]]) -> dict[str, HostClock]:
    """The clocks from a record's events of type ``clock``, by host."""
    measurements: dict[str, list[tuple[float, float, float]]] = {}
    for event in events:
        if event.get("type") != "clock":
            continue
        keys = ("monotonic_s", "offset_s", "uncertainty_s")
        measured = tuple(event.get(key) for key in keys)
        if all(isinstance(value, float) for value in measured):
            theirs_s, offset_s, uncertainty_s = map(float, measured)  # type: ignore[arg-type]  # checked above
            measurements.setdefault(str(event.get("host")), []).append(
                (theirs_s * 1e6, offset_s * 1e6, uncertainty_s)
            )
    return {host: _clock(measured) for host, measured in measurements.items()}


def _clock(measured: list[tuple[float, float, float]]) -> HostClock:
    best_s = min(uncertainty_s for _, _, uncertainty_s in measured)
    limit_s = max(best_s * _MUCH, _GOOD_S)
    used = [point for point in measured if point[2] <= limit_s]
    # By time: one measurement for each.
    points = {theirs: offset for theirs, offset, _ in used}
    return HostClock(
        tuple(sorted(points.items())), max(uncertainty for _, _, uncertainty in used)
    )


_STEPS = "steps"
_MOST = 1 << 53
"""Viewers read numbers as doubles, which are not exact above this."""


def recorded(lines: Iterable[bytes], clocks: dict[str, HostClock]) -> Iterator[Item]:
    """The items in a task's files, whose lines are in order, and the gaps in them."""
    expected: tuple[object, int] = None, 0
    for line in lines:
        try:
            batch = loads(line)
            attempt = batch["attempt"]
            first, last = _whole(batch["first"]), _whole(batch["last"])
            clock = clocks.get(batch["host"])
            items = [] if clock is None else list(_items(batch, clock))
            missing = first - expected[1] if expected[0] == attempt else 0
            expected = attempt, last + 1
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            continue
        if missing > 0 and items:
            at_us = items[0].began_us
            yield Moment(_STEPS, f"{missing} events are missing", at_us)
        yield from items


def _items(batch: dict[str, Any], clock: HostClock) -> Iterator[Span]:
    names, base_us = list(map(str, batch["names"])), batch["base_us"]
    for row, name, after_us, duration_us, *rest in loads(batch["events"].encode()):
        # An event that contains the first event began before it.
        began_us = _whole(base_us + after_us)
        yield Span(
            names[_whole(row)],
            names[_whole(name)],
            clock.ours_us(began_us),
            clock.ours_us(began_us + _whole(duration_us)),
            _args(names[row], names, *map(_whole, rest)),
        )


def _whole(value: Any) -> int:
    """``value`` if it is a number that a task may send. Raises ValueError."""
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(value)
    return value


def _args(
    row: str,
    names: list[str],
    amount: int = 0,
    how: int | None = None,
    waited_us: int = 0,
    arrived_us: int = 0,
) -> dict[str, object]:
    if how is None:
        key = "step" if row == _STEPS else "exchanges"
        return {key: amount} if amount else {}
    args: dict[str, object] = {"bytes": amount, "transport": names[how]}
    if arrived_us:
        args["arrived_ms"] = arrived_us / 1000
    args["waited_ms"] = waited_us / 1000
    return args


Events = Sequence[Mapping[str, Any]]

LAUNCHER = "launcher"
START_UP = "start-up"
TASK = "task"
STALLS = "stalls"
_FINAL = {str(state) for state in TaskState if state.final}
_HOST_STARTED = {"ready", "failed", "lost", "closed"}


def launcher_items(events: Events, now_us: int) -> list[Item]:
    """The states of the run, failures, and the launcher's messages."""
    states = [("starting", _us(events[0], "started"))] if events else []
    items: list[Item] = []
    for event in events:
        at_us = _us(event)
        match event.get("type"):
            case "state" | "end" if event.get("state") != states[-1][0]:
                states.append((str(event.get("state")), at_us))
            case "failure":
                items.append(_failure(LAUNCHER, event))
            case "note":
                items.append(Moment("notes", str(event.get("text")), at_us))
    if states and events[-1].get("type") != "end":
        states.append(("", now_us))
    return [*_in_a_row(LAUNCHER, states), *items]


def host_items(events: Events, host: str, now_us: int) -> list[Item]:
    """The stages of a host's start."""
    stages: list[tuple[str, int]] = []
    ended = False
    for event in events:
        if event.get("host") != host or ended:
            continue
        state = event.get("state")
        if event.get("type") == "host" and state == "starting":
            stages.append(("wait for its turn", _us(event)))
        elif event.get("type") == "host" and state in _HOST_STARTED and stages:
            stages.append(("", _us(event)))
            ended = True
        elif event.get("type") == "stage":
            stages.append((str(event.get("stage")), _us(event, "began")))
    if stages and not ended:
        stages.append(("", now_us))
    return list(_in_a_row(START_UP, stages))


def task_items(events: Events, task: str, now_us: int) -> list[Item]:
    """The attempts of a task, what it was doing, its stalls and failures."""
    own = [event for event in events if event.get("task") == task]
    items: list[Item] = []
    for attempt in sorted({_attempt(event) for event in own if _is_start(event)}):
        those = [e for e in own if _attempt(e) == attempt and e["type"] == "task"]
        items += _attempt_items(those, attempt, now_us)
    items += [_failure(TASK, event) for event in own if event["type"] == "failure"]
    return [*items, *_stalls(own)]


def _attempt_items(events: Events, attempt: int, now_us: int) -> Iterable[Item]:
    began_us = next(_us(event) for event in events if _is_start(event))
    last = next((e for e in events if e.get("state") in _FINAL), None)
    # The launcher's clock may have been set back in the meantime.
    ended_us = max(began_us, now_us if last is None else _us(last))
    keys = ("state", "exit_code", "signal", "cause", "pid")
    args = {key: event[key] for event in events for key in keys if key in event}
    yield Span(TASK, f"attempt {attempt}", began_us, ended_us, args)
    if attempt:
        yield Moment(TASK, f"restart: attempt {attempt}", began_us)
    states = [(str(e["state"]), _us(e)) for e in events if e.get("state") is not None]
    names = {"starting": "spawn", "stopping": "stop"}
    for (state, at_us), (_, until_us) in zip(
        states, [*states[1:], ("", ended_us)], strict=True
    ):
        if state in names:
            yield Span(TASK, names[state], at_us, max(at_us, until_us))
    for event in events:
        if event.get("phase") and _us(event) >= began_us:
            yield Moment(TASK, str(event["phase"]), _us(event))


def _stalls(events: Events) -> Iterable[Item]:
    """One span for each wait, which a task reports several times if it is long."""
    last: Span | None = None
    for event in events:
        since_s = event.get("since_s")
        if event.get("type") != "waiting" or not isinstance(since_s, int | float):
            continue
        ended_us = _us(event)
        # A task may report anything, but nothing lasts longer than since the epoch.
        began_us = ended_us - int(min(max(since_s, 0.0), event["t"]) * 1e6)
        args = {"for ranks": event.get("for") or []}
        name = f"waits in {event.get('what')}"
        if last is not None and began_us >= last.ended_us:
            yield last
        elif last is not None:
            began_us = min(began_us, last.began_us)
        last = Span(STALLS, name, began_us, ended_us, args)
    if last is not None:
        yield last


def _in_a_row(row: str, beginnings: Sequence[tuple[str, int]]) -> Iterable[Span]:
    """The spans of a row: each lasts until the next begins; the last beginning only
    ends the span before it."""
    for (name, began_us), (_, ended_us) in pairwise(beginnings):
        yield Span(row, name, began_us, max(began_us, ended_us))


def _failure(row: str, event: Mapping[str, Any]) -> Moment:
    keys = ("task", "host", "exit_code", "signal", "cause")
    args = {key: event[key] for key in keys if event.get(key) is not None}
    return Moment(row, "failure", _us(event), args)


def _is_start(event: Mapping[str, Any]) -> bool:
    return event.get("type") == "task" and event.get("state") == "starting"


def _attempt(event: Mapping[str, Any]) -> int:
    attempt = event.get("attempt")
    return attempt if isinstance(attempt, int) else 0


def _us(event: Mapping[str, Any], key: str = "t") -> int:
    value = event.get(key)
    at_s = value if isinstance(value, int | float) else event["t"]
    return int(at_s * 1e6)
