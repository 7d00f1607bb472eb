"""The page of a report: its sections, in reading order. Pure."""

from __future__ import annotations

import json
import shlex
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tfcluster.base.states import RunState
from tfcluster.console.text import byte_size, duration, plural
from tfcluster.console.views.failures import how_it_ended
from tfcluster.record.metrics import Sample
from tfcluster.record.run_status import FailureView, TaskView, iso_time
from tfcluster.report import pictures
from tfcluster.report.history import History
from tfcluster.report.html import (
    POLICY,
    STYLE,
    Content,
    document,
    element,
    lines,
    table,
)

_MOST_METRICS = 12
_MOST_TASKS = 1000
_MOST_SECONDARY = 20
_HIDDEN = "(left out)"
_LOOKS = {
    RunState.SUCCEEDED: "good",
    RunState.FAILED: "bad",
    RunState.LOST: "bad",
}

Section = tuple[str, str, list[Content]]
"""The id, the heading and the content."""


def page(history: History) -> str:
    """The whole HTML file."""
    sections = [
        section
        for section in (
            _tasks(history),
            _training(history),
            _speed(history),
            _usage(history),
            _exchanges(history),
            _hosts(history),
            _configuration(history),
        )
        if section[2]
    ]
    links = [
        element("li", element("a", heading, href=f"#{name}"))
        for name, heading, _ in sections
    ]
    view = history.view
    return document(
        f"{view.run}: {view.state}",
        STYLE,
        POLICY,
        element(
            "header",
            element("h1", view.run),
            *_head(history),
            element("nav", element("ul", *links), aria_label="Sections"),
        ),
        element(
            "main",
            *_failures(history),
            *(
                element("section", element("h2", heading), *content, id=name)
                for name, heading, content in sections
            ),
        ),
        element(
            "footer",
            f"Made by tfcluster report at {iso_time(history.now_s)} from the record of "
            "the run. The page loads nothing and runs no script.",
        ),
    )


def _head(history: History) -> list[Content]:
    view = history.view
    looks = _LOOKS.get(view.state, "fair")
    state: list[Content] = [element("span", str(view.state), class_=f"state {looks}")]
    if view.exit_code is not None:
        state.append(f" exit code {view.exit_code}")
    if view.unknown_since_s is not None:
        state.append(f" (its state is unknown since {_clock(view.unknown_since_s)})")
    facts: list[tuple[str, Content]] = [("state", state)]
    first = view.first_failure
    if view.reason and not (first and view.reason == first.cause):
        facts.append(("reason", view.reason))
    if history.argv:
        facts.append(("command", element("code", shlex.join(history.argv))))
    facts += [("name", view.name)] if view.name else []
    facts += [("backend", view.backend)] if view.backend else []
    if view.started_s is not None:
        facts.append(("began", _clock(view.started_s)))
        if view.ended_s is not None:
            facts.append(("ended", _clock(view.ended_s)))
            facts.append(("took", duration(view.ended_s - view.started_s)))
        elif not view.state.final:
            facts.append(("for", duration(history.now_s - view.started_s)))
    notes: list[Content] = []
    if view.notes:
        items = [element("li", note) for note in view.notes]
        summary = element("summary", plural(len(items), "note"))
        notes = [element("details", summary, element("ul", *items))]
    return [_facts(facts), *notes]


def _failures(history: History) -> list[Content]:
    view = history.view
    parts: list[Content] = []
    if first := view.first_failure:
        parts += [element("h2", "First failure"), _failure(first)]
    if view.secondary:
        shown = view.secondary[:_MOST_SECONDARY]
        heading = "Later failures, mostly because of the first one"
        if view.first_failure is None:
            heading = "Failures that a restart recovered from"
        content: list[Content] = [
            element(
                "details",
                element("summary", _where(each), ": ", each.cause),
                *([lines(each.log_tail)] if each.log_tail else []),
            )
            for each in shown
        ]
        if len(view.secondary) > len(shown):
            content.append(element("p", f"and {len(view.secondary) - len(shown)} more"))
        parts += [element("h3", heading), *content]
    hosts = [host for host in view.hosts if host.cause]
    if hosts:
        items = [element("li", f"{h.host}: {h.state}: {h.cause}") for h in hosts]
        parts += [element("h3", "Hosts in trouble"), element("ul", *items)]
    return [element("section", *parts, id="failures")] if parts else []


def _failure(failure: FailureView) -> ET.Element:
    ended = how_it_ended(failure.exit_code, failure.signal)
    content: list[Content] = [
        element("p", element("strong", _where(failure)), f": {failure.cause}")
    ]
    if ended:
        content.append(element("p", f"It ended with {ended}.", class_="soft"))
    if failure.log_tail:
        content += [element("p", "Its last lines:", class_="soft")]
        content.append(lines(failure.log_tail))
    if failure.log:
        content.append(element("p", "Log: ", element("code", failure.log)))
    return element("div", *content, class_="failure")


def _tasks(history: History) -> Section:
    view = history.view
    if not view.tasks:
        return "tasks", "Tasks", [element("p", "The record has no tasks.")]
    last = {task: samples[-1] for task, samples in history.samples_of().items()}
    most_memory = _most_memory(history)
    shown = view.tasks[:_MOST_TASKS]
    rows = [_task_row(t, last.get(t.task), most_memory.get(t.task)) for t in shown]
    header = (
        "task",
        "state",
        "host",
        "attempt",
        "end",
        "ran",
        "steps",
        "steps/s",
        "memory",
        "CPU time",
    )
    content: list[Content] = []
    if picture := pictures.timeline(history):
        content.append(picture)
    numbers = (3, 5, 6, 7, 8, 9)
    caption = "Tasks: memory is the largest that was measured"
    content.append(table(header, rows, caption=caption, numbers=numbers))
    return "tasks", "Tasks", content


def _task_row(
    task: TaskView, last: Sample | None, most_memory: int | None
) -> tuple[str, ...]:
    steps_per_s, cpu_s = task.steps_per_s, task.cpu_s
    step = task.step
    if last is not None:
        steps_per_s = last.steps_per_s if steps_per_s is None else steps_per_s
        cpu_s = last.cpu_s if cpu_s is None else cpu_s
        step = last.step if step is None else step
    return (
        task.task,
        str(task.state),
        task.host or "",
        str(task.attempt),
        how_it_ended(task.exit_code, task.signal),
        "" if task.seconds is None else duration(task.seconds),
        "" if step is None else f"{step:,}",
        "" if steps_per_s is None else f"{steps_per_s:.1f}",
        "" if most_memory is None else byte_size(most_memory),
        "" if cpu_s is None else duration(cpu_s),
    )


def _training(history: History) -> Section:
    name, heading = "training", "Losses and metrics"
    names = pictures.metric_names(history)
    if not names:
        why = "Losses and metrics are those of Keras' fit; this run has reported none."
        return name, heading, [element("p", why, class_="soft")]
    shown = [pictures.metric(history, metric) for metric in names[:_MOST_METRICS]]
    content: list[Content] = [element("div", *shown, class_="pictures")]
    if len(names) > len(shown):
        more = ", ".join(names[_MOST_METRICS:])
        content.append(element("p", f"Not shown: {more}", class_="soft"))
    return name, heading, content


def _speed(history: History) -> Section:
    steps = pictures.over_time(
        history, "Steps per second", lambda s: s.steps_per_s, y="steps/s"
    )
    return "speed", "Speed", _pictures([steps, pictures.waiting(history)])


def _usage(history: History) -> Section:
    charts = [
        pictures.over_time(history, title, value, text=text)
        for title, value, text in (
            ("Memory", lambda s: s.rss_bytes, _size),
            ("CPU time", lambda s: s.cpu_s, duration),
            ("GPUs busy", _busy, _percent),
            ("GPU memory", _gpu_bytes, _size),
        )
    ]
    return "usage", "Memory, CPU and GPUs", _pictures(charts)


def _exchanges(history: History) -> Section:
    carried = pictures.over_time(
        history, "Data exchanged", lambda s: s.exchanged_bytes, text=_size
    )
    picture, *numbers = pictures.exchanges(history) or (None,)
    content = _pictures([picture, carried])
    return "exchanges", "Exchanges", [*content, *numbers]


def _hosts(history: History) -> Section:
    view = history.view
    tasks = Counter(task.host for task in view.tasks)
    if not view.hosts:
        return "hosts", "Hosts", []
    rows = []
    for host in view.hosts:
        machine = history.machines.get(host.host, {})
        gpus = machine.get("gpus")
        rows.append(
            (
                host.host,
                host.state,
                str(tasks[host.host]),
                str(machine.get("cpus") or ""),
                str(len(gpus)) if isinstance(gpus, list) else "",
                str(machine.get("python") or ""),
                host.cause or "",
            )
        )
    header = ("host", "state", "tasks", "CPUs", "GPUs", "Python of the agent", "")
    hosts = table(header, rows, caption="Hosts", numbers=(2, 3, 4))
    return "hosts", "Hosts", [hosts]


def _configuration(history: History) -> Section:
    facts: list[tuple[str, Content]] = []
    if history.version:
        facts.append(("tfcluster", history.version))
    view = history.view
    if view.launcher:
        facts.append(("launched on", view.launcher.host))
    content: list[Content] = []
    by_versions: dict[str, list[str]] = {}
    for task, known in history.versions.items():
        words = ", ".join(f"{name} {version}" for name, version in known.items())
        by_versions.setdefault(words, []).append(task)
    for words, tasks in by_versions.items():
        whose = "tasks" if len(by_versions) == 1 else ", ".join(tasks)
        facts.append((whose, words))
    if facts:
        content.append(_facts(facts))
    if history.settings is not None:
        shown = json.dumps(without_values(history.settings), indent=2, default=str)
        text = "The configuration with which it was launched. Values of environment "
        text += "variables are left out, because they may be secret."
        content += [element("p", text, class_="soft"), lines(shown.splitlines())]
    return "configuration", "Configuration and versions", content


def without_values(settings: Any) -> Any:
    """Settings without the values of environment variables and secrets."""
    if isinstance(settings, Mapping):
        return {
            key: dict.fromkeys(value, _HIDDEN)
            if key in ("env", "secrets") and isinstance(value, Mapping)
            # "--set env.TOKEN=..." may be the place that a value came from.
            else {name: str(place).partition("=")[0] for name, place in value.items()}
            if key == "origins" and isinstance(value, Mapping)
            else without_values(value)
            for key, value in settings.items()
        }
    if isinstance(settings, list):
        return [without_values(each) for each in settings]
    return settings


def _pictures(pictures: Sequence[ET.Element | None]) -> list[Content]:
    known = [picture for picture in pictures if picture is not None]
    return [element("div", *known, class_="pictures")] if known else []


def _facts(facts: Iterable[tuple[str, Content]]) -> ET.Element:
    parts: list[Content] = []
    for name, value in facts:
        parts += [element("dt", name), element("dd", value)]
    return element("dl", *parts)


def _most_memory(history: History) -> dict[str, int]:
    most: dict[str, int] = {}
    for sample in history.metrics.samples:
        for size in (sample.rss_bytes, sample.max_rss_bytes):
            if size is not None:
                most[sample.task] = max(size, most.get(sample.task, 0))
    return most


def _busy(sample: Sample) -> float | None:
    known = [gpu.busy for gpu in sample.gpus if gpu.busy is not None]
    return sum(known) / len(known) if known else None


def _gpu_bytes(sample: Sample) -> float | None:
    known = [gpu.memory_bytes for gpu in sample.gpus if gpu.memory_bytes is not None]
    return float(sum(known)) if known else None


def _size(count: float) -> str:
    return byte_size(int(count))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _where(failure: FailureView) -> str:
    if failure.task is None:
        return failure.host or "?"
    return f"{failure.task} on {failure.host}" if failure.host else failure.task


def _clock(t_s: float) -> Content:
    """A time, in the time zone where the report is made."""
    shown = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(t_s))
    return element("time", shown, datetime=iso_time(t_s) or "")
