"""The pictures of a report, each with its legend and its numbers in a table. Pure."""

from __future__ import annotations

import statistics
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tfcluster.console.text import byte_size, clock, duration, plural
from tfcluster.record.metrics import EpochEnd, Sample
from tfcluster.report import charts
from tfcluster.report.charts import MUTED, Block, ChartLine, Point
from tfcluster.report.history import History
from tfcluster.report.html import COLOURS, Content, element, table

_MOST_ROWS = 40
_MOST_LINES = 64
_MOST_EPOCHS = 50
_ENOUGH_WAITING = 0.05
_ENDS = {"failed": 7, "lost": 7, "succeeded": 2, "stopped": 6}
_STATES = {"starting": 4, "running": 0, "stopping": 6, **_ENDS}
"""The colours of states, and of running until an end."""
_VALIDATION = "val_"


@dataclass(frozen=True, slots=True)
class PictureKey:
    """An entry of a legend."""

    label: str
    colour: int
    dashed: bool = False
    block: bool = False


def timeline(history: History) -> ET.Element | None:
    """When the attempts of tasks started, ran and ended."""
    if not history.spans:
        return None
    tasks = list(dict.fromkeys([t.task for t in history.view.tasks]))
    tasks += sorted({s.task for s in history.spans} - set(tasks))
    shown = tasks[:_MOST_ROWS]
    rows = {task: number for number, task in enumerate(shown)}
    began_s = history.began_s
    blocks, used = [], set()
    for span in history.spans:
        if span.task in rows:
            state = span.state
            if span.outcome and span.state == "running":
                state = span.outcome
            used.add(state)
            blocks.append(
                Block(
                    row=rows[span.task],
                    start=span.start_s - began_s,
                    end=span.end_s - began_s,
                    colour=_STATES[state],
                )
            )
    svg = charts.timeline(
        shown,
        blocks,
        x="time since the start",
        x_text=clock,
        alt=f"When {plural(len(shown), 'task')} started, ran and ended; "
        "the numbers are in the table below",
    )
    keys = [
        PictureKey(f"ran, and {s}" if s in _ENDS else s, colour, block=True)
        for s, colour in _STATES.items()
        if s in used
    ]
    more = len(tasks) - len(shown)
    numbers = table(
        ("task", "attempt", "state", "from", "to", "lasted", "ended as"),
        [
            (
                span.task,
                str(span.attempt),
                span.state,
                clock(span.start_s - began_s),
                clock(span.end_s - began_s),
                duration(span.end_s - span.start_s),
                span.outcome,
            )
            for span in history.spans
            if span.task in rows
        ],
        caption="States of each attempt; times since the start of the run",
        numbers=(1, 3, 4, 5),
    )
    note = f"The first {len(shown)} of {plural(len(tasks), 'task')}." if more else ""
    return _figure("Tasks and attempts", note, svg, keys, numbers, wide=True)


def metric_names(history: History) -> list[str]:
    """The metrics that have pictures, loss first; validation shares its metric's."""
    names: dict[str, None] = {}
    for sample in history.metrics.samples:
        names.update(dict.fromkeys(sample.metrics))
    for epoch in history.metrics.epochs:
        names.update(dict.fromkeys(epoch.metrics))
    bare = dict.fromkeys(name.removeprefix(_VALIDATION) for name in names)
    return sorted(bare, key=lambda name: (name != "loss", list(bare).index(name)))


def metric(history: History, name: str) -> ET.Element:
    """One metric over the steps: for each rank, whole epochs and the validation."""
    lines: list[ChartLine] = []
    keys: list[PictureKey] = []
    for samples in list(history.samples_of().values())[:_MOST_LINES]:
        points = _by_step(samples, lambda s: s.metrics.get(name))
        if points:
            lines.append(ChartLine(points, MUTED))
    if lines:
        keys.append(PictureKey("one rank's rows, within the epoch", MUTED))
    rows: dict[int, list[str]] = {}
    for place, (label, key) in enumerate(
        (("all rows of an epoch", name), ("validation", f"{_VALIDATION}{name}"))
    ):
        points = _epochs(history, key)
        if points:
            lines.append(ChartLine(points, place, dashed=bool(place), marked=True))
            keys.append(PictureKey(label, place, dashed=bool(place)))
        for epoch in _first_task_epochs(history):
            if key in epoch.metrics:
                row = rows.setdefault(epoch.epoch, ["", ""])
                row[place] = _number(epoch.metrics[key])
    chosen = _spread(sorted(rows), _MOST_EPOCHS)
    numbers = table(
        ("epoch", "training", "validation"),
        [(str(epoch), *rows[epoch]) for epoch in chosen],
        caption=f"{name} at the end of epochs",
        numbers=(0, 1, 2),
    )
    known = [value for line in lines for _, value in line.points if value is not None]
    svg = charts.line_chart(
        lines,
        x="step",
        y="",
        alt=f"{name} over the steps, {_span(known)}",
        from_zero=False,
    )
    return _figure(name, "", svg, keys, numbers if rows else None)


def over_time(
    history: History,
    title: str,
    value: Callable[[Sample], float | None],
    *,
    y: str = "",
    text: Callable[[float], str] | None = None,
) -> ET.Element | None:
    """A value of each task over time, if any task has it."""
    by_task: dict[str, list[Point]] = {}
    for task, samples in history.samples_of().items():
        points: list[Point] = []
        for before, sample in zip([None, *samples], samples, strict=False):
            number = value(sample)
            at = sample.t - history.began_s
            if before is not None and before.attempt != sample.attempt:
                points.append((at, None))
            if number is not None:
                points.append((at, number))
        if any(point[1] is not None for point in points):
            by_task[task] = points
    if not by_task:
        return None
    lines, keys = _told_apart(by_task)
    write = text or (lambda number: f"{number:.1f}")
    known = [v for points in by_task.values() for _, v in points if v is not None]
    svg = charts.line_chart(
        lines,
        x="time since the start",
        y=y,
        x_text=clock,
        y_text=text,
        alt=f"{title} of {plural(len(by_task), 'task')} over the time, "
        f"between {write(min(known))} and {write(max(known))}",
    )
    rows = []
    for task, points in by_task.items():
        numbers = [v for _, v in points if v is not None]
        last = write(numbers[-1])
        middle = write(statistics.median(numbers))
        rows.append((task, write(min(numbers)), middle, write(max(numbers)), last))
    numbers_table = table(
        ("task", "least", "median", "most", "last"),
        rows,
        caption=title,
        numbers=(1, 2, 3, 4),
    )
    return _figure(title, "", svg, keys, numbers_table)


def waiting(history: History) -> ET.Element | None:
    """How much each rank waits; the rank that waits least is the slowest."""
    shares: list[tuple[str, float]] = []
    for task, samples in history.samples_of().items():
        known = [s.wait_share for s in samples if s.wait_share is not None]
        if known:
            shares.append((task, statistics.fmean(known)))
    if len(shares) < 2:
        return None
    slowest = min(shares, key=lambda pair: pair[1])
    most = max(share for _, share in shares)
    differ = most - slowest[1] >= _ENOUGH_WAITING
    note = (
        f"{slowest[0]} waits least, so the others wait for it: it is the slowest."
        if differ
        else "All ranks wait about equally long: none is much slower than the others."
    )
    shown = shares[:_MOST_ROWS]
    if slowest not in shown:
        shown[-1] = slowest
    svg = charts.bar_chart(
        shown,
        x="share of the time spent waiting for others",
        x_text=lambda share: f"{100 * share:.0f} %",
        most=max(1.05 * most, 0.1),
        marked=shown.index(slowest) if differ else None,
        alt=f"Share of waiting of {plural(len(shown), 'rank')}: from "
        f"{slowest[1]:.0%} ({slowest[0]}) to {most:.0%}",
    )
    numbers = table(
        ("task", "waiting"),
        [(task, f"{100 * share:.1f} %") for task, share in shares],
        caption="Mean share of the time spent waiting for others",
        numbers=(1,),
    )
    return _figure("Waiting by rank", note, svg, [], numbers)


def exchanges(history: History) -> tuple[ET.Element, ET.Element] | None:
    """The cost of exchanges between ranks: a picture, and a table by purpose."""
    seconds: dict[str, float] = {}
    counts: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for totals in history.metrics.exchanges.values():
        for total in totals:
            seconds[total.what] = seconds.get(total.what, 0.0) + total.seconds
            counts[total.what] = counts.get(total.what, 0) + total.count
            sizes[total.what] = sizes.get(total.what, 0) + total.bytes
    if not seconds:
        return None
    order = sorted(seconds, key=lambda what: -seconds[what])
    svg = charts.bar_chart(
        [(what, seconds[what]) for what in order[:12]],
        x="seconds, all ranks together",
        alt=f"Time of exchanges by purpose: most for {order[0]}, "
        f"{duration(seconds[order[0]])}",
    )
    numbers = table(
        ("purpose", "exchanges", "size of one", "bytes", "time of one", "time"),
        [
            (
                what,
                f"{counts[what]:,}",
                byte_size(sizes[what] // max(counts[what], 1)),
                byte_size(sizes[what]),
                f"{1000 * seconds[what] / max(counts[what], 1):.2f} ms",
                duration(seconds[what]),
            )
            for what in order
        ],
        caption="Exchanges of all ranks together; times include waiting for others",
        numbers=(1, 2, 3, 4, 5),
    )
    return _figure("Time of exchanges", "", svg, [], None), numbers


def _figure(
    title: str,
    note: str,
    svg: ET.Element,
    keys: Sequence[PictureKey],
    numbers: ET.Element | None,
    *,
    wide: bool = False,
) -> ET.Element:
    small: list[Content] = [element("small", note)] if note else []
    picture = svg
    if wide:  # On a narrow screen, its words would be too small to read.
        picture = element("div", svg, class_="scroll", tabindex="0")
    parts: list[Content] = [element("figcaption", title, *small), picture]
    if keys:
        parts.append(element("ul", *map(_entry, keys), class_="legend"))
    if numbers is not None:
        parts.append(element("details", element("summary", "Numbers"), numbers))
    return element("figure", *parts, **({"class_": "wide"} if wide else {}))


def _entry(key: PictureKey) -> ET.Element:
    colour = "var(--muted)" if key.colour == MUTED else f"var(--c{key.colour})"
    kind = "key block" if key.block else "key dashed" if key.dashed else "key"
    swatch = element("span", class_=kind, style=f"color: {colour}", aria_hidden="true")
    return element("li", swatch, element("span", key.label))


def _told_apart(
    found: Mapping[str, list[Point]],
) -> tuple[list[ChartLine], list[PictureKey]]:
    """A colour for each task; if there are many, only for the lowest and highest."""
    if len(found) <= COLOURS:
        pairs = list(enumerate(found.items()))
        lines = [ChartLine(points, number) for number, (_, points) in pairs]
        return lines, [PictureKey(task, number) for number, (task, _) in pairs]
    means = {
        task: statistics.fmean(v for _, v in points if v is not None)
        for task, points in found.items()
    }
    order = sorted(means, key=lambda task: means[task])
    low, high = order[0], order[-1]
    others = [task for task in found if task not in (low, high)][:_MOST_LINES]
    lines = [ChartLine(found[task], MUTED) for task in others]
    lines += [ChartLine(found[low], 1), ChartLine(found[high], 0)]
    rest = len(found) - 2
    keys = [PictureKey(f"{high} (highest)", 0), PictureKey(f"{low} (lowest)", 1)]
    shown = "" if len(others) == rest else f", of which {len(others)} are shown"
    return lines, [*keys, PictureKey(f"{plural(rest, 'other')}{shown}", MUTED)]


def _by_step(
    samples: Sequence[Sample], value: Callable[[Sample], float | None]
) -> list[Point]:
    """Points over steps, with gaps between epochs and attempts."""
    points: list[Point] = []
    before: Sample | None = None
    for sample in samples:
        number = value(sample)
        if sample.step is None or not sample.metrics:
            continue
        if before is not None and sample.step == before.step:
            continue
        place = sample.epoch, sample.attempt
        if before is not None and place != (before.epoch, before.attempt):
            points.append((sample.step, None))
        points.append((sample.step, number))
        before = sample
    return points if any(point[1] is not None for point in points) else []


def _first_task_epochs(history: History) -> list[EpochEnd]:
    """The epochs as the first rank has reported them: all ranks report the same."""
    epochs = history.metrics.epochs
    order = [task.task for task in history.view.tasks]
    tellers = {epoch.task for epoch in epochs}
    first = next((task for task in order if task in tellers), None)
    return [epoch for epoch in epochs if epoch.task == first or first is None]


def _epochs(history: History, name: str) -> list[Point]:
    points: list[Point] = []
    attempt = 0
    for epoch in _first_task_epochs(history):
        if name in epoch.metrics and epoch.step is not None:
            if epoch.attempt != attempt:
                points.append((epoch.step, None))
                attempt = epoch.attempt
            points.append((epoch.step, epoch.metrics[name]))
    return points if any(point[1] is not None for point in points) else []


def _spread(items: Sequence[int], most: int) -> list[int]:
    """At most ``most`` of the items, evenly spread, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.5g}"


def _span(values: Sequence[float]) -> str:
    if not values:
        return "which is never a finite number"
    return f"between {min(values):.4g} and {max(values):.4g}"
