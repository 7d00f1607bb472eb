"""The state of a run, or a line of it in a list, and results that came back. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tfcluster.base.states import RunState
from tfcluster.console.display import PLAIN, Style
from tfcluster.console.sanitise import sanitise_word
from tfcluster.console.text import byte_size, clock, duration, plural, table, times
from tfcluster.console.views.failures import failure, how_it_ended
from tfcluster.record.run_status import (
    FitView,
    ResultsView,
    RunView,
    ServingView,
    TaskView,
)

_SHOWN_HOSTS = 3


def result_lines(view: ResultsView) -> list[str]:
    """All lines about the results of one host; at least one line."""
    host = sanitise_word(view.host)
    if view.state == "shared":
        return [f"{host} shares the working directory: nothing to fetch"]
    lines = []
    if view.cause is None and not view.files and not view.missed_count:
        there = sanitise_word(view.there or "its working directory")
        lines.append(f"results from {host}: no file in {there} matches")
    elif view.cause is None or view.fetched or view.unchanged:
        lines.append(f"results from {host}: {_counts(view)}")
    if view.cause is not None:
        why = sanitise_word(view.cause)
        lines.append(f"warning: results from {host} are incomplete: {why}")
    for names, words in (
        (view.kept, "not replaced by the file of"),
        (view.growing, "still written to on"),
    ):
        lines += [
            f"{words} {host}: {sanitise_word(path)}: {sanitise_word(why)}"
            for path, why in names
        ]
    lines += [
        f"warning: not fetched from {host}: {sanitise_word(path)}: {sanitise_word(why)}"
        for path, why in view.missed
    ]
    if (more := view.missed_count - len(view.missed)) > 0:
        lines.append(f"warning: not fetched from {host}: {plural(more, 'more file')}")
    return lines


def result_summary(views: Sequence[ResultsView]) -> list[str]:
    """One line for each host whose results are incomplete, and one for the others."""
    lines = []
    for view in views:
        if view.state != "incomplete":
            continue
        why = view.cause or ", ".join(path for path, _ in view.missed[:_SHOWN_HOSTS])
        count = f"{plural(view.missed_count, 'file')} missing, " * bool(
            view.missed_count
        )
        lines.append(
            sanitise_word(f"results from {view.host} are incomplete: {count}{why}")
        )
    well = [view for view in views if view.state == "fetched"]
    for view in well[:_SHOWN_HOSTS]:
        lines.append(sanitise_word(f"results from {view.host}: {_counts(view)}"))
    if len(well) > _SHOWN_HOSTS:
        lines.append(f"results from {plural(len(well) - _SHOWN_HOSTS, 'more host')}")
    return lines


def progress_text(hosts: Mapping[str, Mapping[str, Any]]) -> str:
    """``fetching results: node1 12.4 MB of 80.0 MB``, for hosts not yet done."""
    sizes = {
        host: (int(progress.get("bytes") or 0), int(progress.get("of_bytes") or 0))
        for host, progress in hosts.items()
    }
    busy = {host: size for host, size in sizes.items() if size[0] < size[1]}
    amounts = ", ".join(
        f"{sanitise_word(host)} {byte_size(done)} of {byte_size(total)}"
        for host, (done, total) in list(busy.items())[:_SHOWN_HOSTS]
    )
    left = len(busy) - _SHOWN_HOSTS
    more = f" and {left} more hosts" if left > 0 else ""
    return f"fetching results: {amounts}{more}" if amounts else "fetching results"


def _counts(view: ResultsView) -> str:
    text = f"{plural(view.fetched, 'file')}, {byte_size(view.sent_bytes)}"
    return f"{text}; {view.unchanged:,} unchanged" if view.unchanged else text


_LOSS = "loss"


def epoch_text(fit: FitView | None) -> str:
    return "" if fit is None else _of(fit.epoch, fit.epochs)


def step_text(task: TaskView) -> str:
    """``17/23`` in an epoch; otherwise the number of all steps."""
    if task.fit is not None and task.fit.epoch_step is not None:
        return _of(task.fit.epoch_step, task.fit.epoch_steps)
    return "" if task.step is None else str(task.step)


def loss_text(task: TaskView) -> str:
    if _LOSS not in task.metrics:
        return ""
    loss = task.metrics[_LOSS]
    return "nan" if loss is None else f"{loss:.4g}"


def _of(part: int, whole: int | None) -> str:
    return str(part) if whole is None else f"{part}/{whole}"


_HEADER = (
    *("task", "state", "host", "pid", "epoch", "step", "steps/s", "loss", "waiting"),
    *("left", "end", ""),
)
_NUMBERS = range(3, 10)


def status(view: RunView, now_s: float, style: Style = PLAIN) -> list[str]:
    lines = [
        f"{style.bold(sanitise_word(view.run))}  {state_words(view, now_s, style)}"
    ]
    facts = [sanitise_word(view.backend or ""), _when(view, now_s)]
    lines.append("  ".join(fact for fact in facts if fact))
    lines += _chain(view)
    lines += _troubles(view)
    lines += result_summary(view.results)
    if view.first_failure:
        lines += ["", *failure(view, style)]
    if view.tasks:
        rows = [_row(task, style) for task in view.tasks]
        lines += ["", *table(rows, style.header(*_HEADER), right=_NUMBERS)]
    return lines


def status_line(view: RunView, now_s: float, style: Style = PLAIN) -> str:
    began = f"  began {clock_time(view.started_s, now_s)}" if view.started_s else ""
    return f"{sanitise_word(view.run)}  {state_words(view, now_s, style)}{began}"


def state_words(view: RunView, now_s: float, style: Style) -> str:
    """The state in colour, with the exit code unless the run succeeded."""
    if view.unknown_since_s is not None:
        seen = clock_time(view.unknown_since_s, now_s)
        return style.yellow(f"unknown since {seen}") + f" (was {view.state})"
    word = style.by_state(view.state, str(view.state))
    if view.exit_code is not None and view.state is not RunState.SUCCEEDED:
        word += f" (exit code {view.exit_code})"
    return word


def _when(view: RunView, now_s: float) -> str:
    if view.started_s is None:
        return ""
    began = f"began {clock_time(view.started_s, now_s)}"
    if view.ended_s is not None:
        took = duration(view.ended_s - view.started_s)
        return f"{began}, ended {clock_time(view.ended_s, now_s)}, took {took}"
    if view.unknown_since_s is not None or view.since_s is None:
        return began
    return f"{began}, {view.state} for {duration(now_s - view.since_s)}"


def _chain(view: RunView) -> list[str]:
    """The runs before and after this one, if its job was started again."""
    lines = []
    if view.follows:
        limit = "requeued after the time limit"
        count = f" ({limit}, {times(view.requeues)})" if view.requeues else ""
        lines.append(f"continues {sanitise_word(view.follows)}{count}")
    if view.continued_as:
        lines.append(f"continued as {sanitise_word(view.continued_as)}")
    return lines


def _troubles(view: RunView) -> list[str]:
    """Reasons and notes that the first failure does not mention, each once."""
    first = view.first_failure
    causes = [first.cause] if first else []
    lines = []
    if view.reason and view.reason not in causes:
        lines.append(f"reason: {sanitise_word(view.reason)}")
        causes.append(view.reason)
    failures = (first, *view.secondary)
    failed = {failure.host for failure in failures if failure and not failure.task}
    lines += [
        sanitise_word(f"host {host.host}: {host.state}: {host.cause}")
        for host in view.hosts
        if host.cause and host.host not in failed
    ]
    return lines + [
        f"note: {sanitise_word(note)}"
        for note in view.notes
        if not note.startswith(tuple(f"{cause}:" for cause in causes))
    ]


def _row(task: TaskView, style: Style) -> tuple[str, ...]:
    return (
        sanitise_word(task.task),
        style.by_state(task.state, task.state_words),
        sanitise_word(task.host or ""),
        str(task.pid or ""),
        epoch_text(task.fit),
        step_text(task),
        "" if task.steps_per_s is None else f"{task.steps_per_s:.1f}",
        loss_text(task),
        "" if task.wait_share is None else f"{100 * task.wait_share:.0f} %",
        "" if task.left_s is None else clock(task.left_s),
        how_it_ended(task.exit_code, task.signal),
        _remark(task),
    )


def _remark(task: TaskView) -> str:
    parts = [f"attempt {task.attempt}"] if task.attempt else []
    if task.step is None and task.phase and not task.state.final:
        parts.append(sanitise_word(task.phase))
    if task.serving is not None:
        parts.append(_served(task.serving))
    return ", ".join(parts)


def _served(serving: ServingView) -> str:
    parts = [f"{serving.applied:,} updates", byte_size(serving.bytes)]
    if serving.staleness_max:
        most = f"at most {serving.staleness_max:,}"
        parts.append(f"staleness {serving.staleness_mean:.1f} ({most})")
    if serving.dropped:
        parts.append(f"{serving.dropped:,} dropped")
    return ", ".join(parts)


def clock_time(t_s: float, now_s: float) -> str:
    """Local time, with the date unless it is today; ``?`` for an invalid time."""
    try:
        then, now = time.localtime(t_s), time.localtime(now_s)
    except (OSError, OverflowError, ValueError):
        return "?"
    today = then[:3] == now[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", then)


def run_list(views: Sequence[RunView], now_s: float, style: Style = PLAIN) -> list[str]:
    rows = [_run_row(view, now_s, style) for view in views]
    header = style.header("run", "backend", "began", "took", "state")
    return table(rows, header, right=(3,))


def _run_row(view: RunView, now_s: float, style: Style) -> tuple[str, ...]:
    began_s, until_s = view.started_s, view.ended_s
    if until_s is None and not view.state.final:
        until_s = view.unknown_since_s or now_s
    took = ""
    if began_s is not None and until_s is not None:
        took = duration(until_s - began_s)
    return (
        sanitise_word(view.run),
        sanitise_word(view.backend or ""),
        "" if began_s is None else clock_time(began_s, now_s),
        took,
        state_words(view, now_s, style),
    )
