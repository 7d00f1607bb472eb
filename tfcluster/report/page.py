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
_LOOKS = {RunState.SUCCEEDED: "good", RunState.FAILED: "bad", RunState.LOST: "bad"}


def page(history: History) -> str:
    sections = {
        heading: content
        for heading, content in (
            ("Tasks", _tasks(history)),
            ("Training", _training(history)),
            ("Speed", _speed(history)),
            ("Usage", _usage(history)),
            ("Exchanges", _exchanges(history)),
            ("Hosts", _hosts(history)),
            ("Configuration", _configuration(history)),
        )
        if content
    }
    links = [
        element("li", element("a", heading, href=f"#{heading.lower()}"))
        for heading in sections
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
                element("section", element("h2", name), *content, id=name.lower())
                for name, content in sections.items()
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
    if isinstance(argv := _run_event(history).get("argv"), list):
        facts.append(("command", element("code", shlex.join(map(str, argv)))))
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
                element("summary", failure.where or "?", ": ", failure.cause),
                *([lines(failure.log_tail)] if failure.log_tail else []),
            )
            for failure in shown
        ]
        if len(view.secondary) > len(shown):
            content.append(element("p", f"and {len(view.secondary) - len(shown)} more"))
        parts += [element("h3", heading), *content]
    return [element("section", *parts, id="failures")] if parts else []


def _failure(failure: FailureView) -> ET.Element:
    ended = how_it_ended(failure.exit_code, failure.signal)
    content: list[Content] = [
        element("p", element("strong", failure.where or "?"), f": {failure.cause}")
    ]
    if ended:
        content.append(element("p", f"It ended with {ended}.", class_="soft"))
    if failure.log_tail:
        content += [element("p", "Its last lines:", class_="soft")]
        content.append(lines(failure.log_tail))
    if failure.log:
        content.append(element("p", "Log: ", element("code", failure.log)))
    return element("div", *content, class_="failure")


def _tasks(history: History) -> list[Content]:
    if not history.view.tasks:
        return [element("p", "The record has no tasks.")]
    samples_of = history.samples_of()
    rows = [
        _task_row(task, samples_of.get(task.task, []))
        for task in history.view.tasks[:_MOST_TASKS]
    ]
    header = (
        *("task", "state", "host", "attempt", "end", "ran", "steps", "steps/s"),
        *("memory", "CPU time"),
    )
    caption = "Tasks: memory is the largest that was measured"
    numbers = table(header, rows, caption=caption, numbers=(3, 5, 6, 7, 8, 9))
    picture = pictures.timeline(history)
    return [numbers] if picture is None else [picture, numbers]


def _task_row(task: TaskView, samples: Sequence[Sample]) -> tuple[str, ...]:
    last = samples[-1] if samples else None
    step, steps_per_s, cpu_s = (
        value if value is not None or last is None else getattr(last, name)
        for name, value in (
            ("step", task.step),
            ("steps_per_s", task.steps_per_s),
            ("cpu_s", task.cpu_s),
        )
    )
    memory = [s.rss_bytes or 0 for s in samples] + [
        s.max_rss_bytes or 0 for s in samples
    ]
    return (
        task.task,
        str(task.state),
        task.host or "",
        str(task.attempt),
        how_it_ended(task.exit_code, task.signal),
        "" if task.seconds is None else duration(task.seconds),
        "" if step is None else f"{step:,}",
        "" if steps_per_s is None else f"{steps_per_s:.1f}",
        byte_size(max(memory)) if any(memory) else "",
        "" if cpu_s is None else duration(cpu_s),
    )


def _training(history: History) -> list[Content]:
    names = pictures.metric_names(history)
    if not names:
        why = "Losses and metrics are those of Keras' fit; this run has reported none."
        return [element("p", why, class_="soft")]
    content = _pictures(
        pictures.metric(history, name) for name in names[:_MOST_METRICS]
    )
    if left := names[_MOST_METRICS:]:
        content.append(element("p", f"Not shown: {', '.join(left)}", class_="soft"))
    return content


def _speed(history: History) -> list[Content]:
    steps = pictures.over_time(
        history, "Steps per second", lambda s: s.steps_per_s, y="steps/s"
    )
    return _pictures([steps, pictures.waiting(history)])


def _usage(history: History) -> list[Content]:
    return _pictures(
        pictures.over_time(history, title, value, text=text)
        for title, value, text in (
            ("Memory", lambda s: s.rss_bytes, _size),
            ("CPU time", lambda s: s.cpu_s, duration),
            ("GPUs busy", _busy, pictures.percent),
            ("GPU memory", _gpu_bytes, _size),
        )
    )


def _exchanges(history: History) -> list[Content]:
    carried = pictures.over_time(
        history, "Data exchanged", lambda s: s.exchanged_bytes, text=_size
    )
    by_purpose = pictures.exchanges(history)
    return [*_pictures([carried]), *([] if by_purpose is None else [by_purpose])]


def _hosts(history: History) -> list[Content]:
    if not history.view.hosts:
        return []
    tasks = Counter(task.host for task in history.view.tasks)
    machines = history.facts_of("machine", "host")
    rows = []
    for host in history.view.hosts:
        machine = machines.get(host.host, {})
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
    return [table(header, rows, caption="Hosts", numbers=(2, 3, 4))]


def _configuration(history: History) -> list[Content]:
    facts: list[tuple[str, Content]] = []
    if version := _run_event(history).get("version"):
        facts.append(("tfcluster", str(version)))
    if launcher := history.view.launcher:
        facts.append(("launched on", launcher.host))
    tasks_by_versions: dict[str, list[str]] = {}
    for task, event in history.facts_of("versions", "task").items():
        if isinstance(versions := event.get("versions"), Mapping):
            words = ", ".join(f"{name} {number}" for name, number in versions.items())
            tasks_by_versions.setdefault(words, []).append(task)
    for words, tasks in tasks_by_versions.items():
        whose = "tasks" if len(tasks_by_versions) == 1 else ", ".join(tasks)
        facts.append((whose, words))
    content: list[Content] = [_facts(facts)] if facts else []
    if history.settings is not None:
        shown = json.dumps(without_values(history.settings), indent=2, default=str)
        text = "The configuration with which it was launched. Values of environment "
        text += "variables are left out, because they may be secret."
        content += [element("p", text, class_="soft"), lines(shown.splitlines())]
    return content


def _run_event(history: History) -> Mapping[str, Any]:
    return next((e for e in history.events if e["type"] == "run"), {})


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
        return [without_values(entry) for entry in settings]
    return settings


def _pictures(drawn: Iterable[ET.Element | None]) -> list[Content]:
    pictures = [picture for picture in drawn if picture is not None]
    return [element("div", *pictures, class_="pictures")] if pictures else []


def _facts(facts: Iterable[tuple[str, Content]]) -> ET.Element:
    parts: list[Content] = []
    for name, value in facts:
        parts += [element("dt", name), element("dd", value)]
    return element("dl", *parts)


def _busy(sample: Sample) -> float | None:
    shares = [gpu.busy for gpu in sample.gpus if gpu.busy is not None]
    return sum(shares) / len(shares) if shares else None


def _gpu_bytes(sample: Sample) -> float | None:
    sizes = [gpu.memory_bytes for gpu in sample.gpus if gpu.memory_bytes is not None]
    return float(sum(sizes)) if sizes else None


def _size(count: float) -> str:
    return byte_size(int(count))


def _clock(t_s: float) -> Content:
    shown = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(t_s))
    return element("time", shown, datetime=iso_time(t_s) or "")
