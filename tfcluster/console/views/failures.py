"""How a run ended: its failures, equal ones only once, and its tasks. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from tfcluster.base.states import TaskState
from tfcluster.console.display import PLAIN, Style
from tfcluster.console.sanitise import sanitise, sanitise_word, settle
from tfcluster.console.text import duration, fold_tasks, is_rank, table
from tfcluster.plan.host_patterns import fold
from tfcluster.record.run_status import FailureView, RunView, TaskView

_TAIL_LINES = 20
_TRACEBACK = "Traceback (most recent call last):"
_VICTIMS = 4
_HOSTS = 32
_RACE = re.compile(
    r"FileExistsError|FileNotFoundError|BlockingIOError|"
    r"OSError: \[Errno (?:39|98)\]|.*(?:[Uu]nable to (?:synchronously )?"
    r"(?:lock|create|open) file)"
)
"""What fails if another process does the same at the same time."""


def failure(view: RunView, style: Style = PLAIN) -> list[str]:
    """The first failure with its last log lines, then other hosts and tasks."""
    first = view.first_failure
    if first is None:
        return []
    ranks = [task.task for task in view.tasks if is_rank(task.task)]
    alike = [
        other
        for other in view.secondary
        if is_rank(other.task or "") and other.cause == first.cause
    ]
    all_alike = len(ranks) > 1 and len(alike) == len(ranks) - 1
    headline = _headline(first, f"all {len(ranks):,} ranks" if all_alike else "")
    lines = [style.red("first failure: ") + style.bold(headline)]
    lines += [f"  | {line}" for line in _tail(first.log_tail)]
    if len(ranks) > 1 and not all_alike and _RACE.match(first.cause):
        lines.append(
            f"  hint: all {len(ranks):,} ranks run the script at the same time, so one "
            "of them may find what another has just made or removed: allow for that "
            "(exist_ok=True), or do it only where TFCLUSTER_RANK is 0"
        )
    if first.log:
        lines.append(f"  log: {sanitise_word(first.log)}")
    failed = {f.host: [f.cause] for f in view.secondary if f.host and not f.task}
    # In the order of the plan: tasks fail in any order, and ranges are easier to read.
    planned = [host.host for host in view.hosts if host.host in failed]
    hosts = {host: failed[host] for host in dict.fromkeys([*planned, *failed])}
    lines += fold_errors(hosts, style)[:_HOSTS]
    if len(hosts) > _HOSTS:
        lines.append(style.dim(f"{len(hosts):,} hosts failed in total"))
    victims = [
        other
        for other in view.secondary
        if (other.task or not other.host) and not (all_alike and other in alike)
    ]
    if victims:
        lines.append(style.dim(_victims(victims)))
    return lines


def fold_errors(errors: Mapping[str, Sequence[str]], style: Style = PLAIN) -> list[str]:
    """The errors of hosts in order, equal ones once: ``node[1-9]: ...``."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for host, lines in errors.items():
        # Messages that differ only in the host's own name are equal.
        text = tuple(_without(host, sanitise_word(line)) for line in lines)
        alike.setdefault(text, []).append(host)
    folded = []
    for text, hosts in alike.items():
        first, *rest = text or ("failed",)
        where = style.bold(sanitise_word(fold(hosts)))
        count = f" ({len(hosts)} hosts)" if len(hosts) > 1 else ""
        folded.append(f"{where}{count}: {first}")
        folded += [f"  {line}" for line in rest]
    return folded


def _headline(failure: FailureView, who_else: str) -> str:
    where = sanitise_word(failure.where or "the run")
    cause = sanitise_word(failure.cause)
    fate = how_it_ended(failure.exit_code, failure.signal)
    mentioned = not fate or fate.removeprefix("exit ") in cause
    remarks = ", ".join(filter(None, ("" if mentioned else fate, who_else)))
    return f"{where}: {cause}" + (f" ({remarks})" if remarks else "")


def how_it_ended(exit_code: int | None, signal: str | None) -> str:
    """``exit 3``, ``SIGKILL``, or ""."""
    if signal:
        return sanitise_word(signal)
    return "" if exit_code is None else f"exit {exit_code}"


def _tail(lines: Sequence[str]) -> list[str]:
    shown = [sanitise(settle(line)) for line in lines]
    shown = [part for line in shown for part in line.split("\n")][-_TAIL_LINES:]
    begins = [place for place, line in enumerate(shown) if line == _TRACEBACK]
    return shown[begins[-1] :] if begins else shown


def _victims(failures: Sequence[FailureView]) -> str:
    shown = []
    for failure in failures[:_VICTIMS]:
        fate = how_it_ended(failure.exit_code, failure.signal)
        name = sanitise_word(failure.task or failure.host or "?")
        shown.append(f"{name} ({fate})" if fate else name)
    if len(failures) > _VICTIMS:
        shown.append(f"and {len(failures) - _VICTIMS:,} more")
    return "then also failed: " + ", ".join(shown)


def _without(host: str, line: str) -> str:
    for mark in (f"{host}: ", f"{host}:"):
        if line.startswith(mark):
            return line[len(mark) :]
    return line


_ROWS = 40


def outcome(view: RunView, style: Style = PLAIN) -> list[str]:
    first = view.first_failure.task if view.first_failure else None
    shown = view.tasks
    if len(shown) > _ROWS:
        shown = tuple(t for t in shown if t.state in (TaskState.FAILED, TaskState.LOST))
        shown = tuple(sorted(shown, key=lambda task: task.task != first))[:_ROWS]
    listed = {task.task for task in shown}
    rest = [task for task in view.tasks if task.task not in listed]
    rows = [_row(task, first, style) for task in shown]
    lines = table(rows, style.header("task", "host", "end", "time", ""), right=(3,))
    by_state: dict[str, list[str]] = {}
    for task in rest:
        by_state.setdefault(task.state_words, []).append(sanitise_word(task.task))
    return lines + [
        f"{fold_tasks(names)}: {state}" for state, names in by_state.items()
    ]


def where_logs_are(view: RunView, style: Style = PLAIN) -> list[str]:
    if view.first_failure is not None or not view.tasks or not view.tasks[0].log:
        return []
    folder = sanitise_word(str(PurePath(view.tasks[0].log).parent))
    return [style.dim(f"logs: {folder} (tfcluster logs {sanitise_word(view.run)})")]


def _row(task: TaskView, first: str | None, style: Style) -> tuple[str, ...]:
    return (
        sanitise_word(task.task),
        sanitise_word(task.host or ""),
        style.by_state(task.state, _end(task)),
        duration(task.seconds) if task.seconds is not None else "",
        style.red("<- first failure") if task.task == first else "",
    )


def _end(task: TaskView) -> str:
    """``succeeded``, ``failed, exit 3``, or just ``stopped``: the signal was ours."""
    fate = how_it_ended(task.exit_code, task.signal)
    if task.state is TaskState.FAILED and fate:
        return f"{task.state}, {fate}"
    return task.state_words
