"""What a run's events show: start of hosts, attempts, stalls, failures. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tfcluster.base.states import TaskState
from tfcluster.trace.spans import Item, Moment, Span

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
