"""The pictures of a report, each with its legend. Pure."""

from __future__ import annotations

import statistics
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from tfcluster.console.text import byte_size, clock, duration, plural
from tfcluster.protocol.task_events import ExchangeTotal
from tfcluster.record.metrics import EpochEnd, Sample
from tfcluster.report import charts
from tfcluster.report.charts import MUTED, Block, ChartLine, Point
from tfcluster.report.history import History
from tfcluster.report.html import COLOURS, Content, element, table
from tfcluster.trace.spans import TASK, Span, task_items

_MOST_ROWS = 40
_MOST_LINES = 64
_ENOUGH_WAITING = 0.05
_COLOURS_OF_STATES = {
    "starting": 4,
    "running": 0,
    "stopping": 6,
    "failed": 7,
    "lost": 7,
    "succeeded": 2,
    "stopped": 6,
}
_STATES_OF_SPANS = {"spawn": "starting", "stop": "stopping"}
_VALIDATION = "val_"


def timeline(history: History) -> ET.Element | None:
    """When the attempts of tasks started, ran and ended."""
    tasks = [task.task for task in history.view.tasks]
    shown = tasks[:_MOST_ROWS]
    blocks = [
        block for row, task in enumerate(shown) for block in _blocks(history, row, task)
    ]
    if not blocks:
        return None
    svg = charts.timeline(
        shown,
        blocks,
        x="time since the start",
        x_text=clock,
        alt=f"When {plural(len(shown), 'task')} started, ran and ended",
    )
    note = ""
    if len(tasks) > len(shown):
        note = f"The first {len(shown)} of {plural(len(tasks), 'task')}."
    return _figure("Tasks and attempts", svg, blocks, note=note)


def _blocks(history: History, row: int, task: str) -> Iterable[Block]:
    """The attempts of a task, with their start and their stop drawn over them."""
    for item in task_items(history.events, task, int(history.ended_s * 1e6)):
        if not isinstance(item, Span) or item.row != TASK:
            continue
        state = _STATES_OF_SPANS.get(item.name, str(item.args.get("state")))
        ended = state in ("failed", "lost", "succeeded", "stopped")
        yield Block(
            label=f"ran, and {state}" if ended else state,
            row=row,
            start=item.began_us / 1e6 - history.began_s,
            end=item.ended_us / 1e6 - history.began_s,
            colour=_COLOURS_OF_STATES.get(state, MUTED),
        )


def metric_names(history: History) -> list[str]:
    """The metrics that have pictures, loss first; validation shares its metric's."""
    names = chain(
        chain.from_iterable(sample.metrics for sample in history.metrics.samples),
        chain.from_iterable(epoch.metrics for epoch in history.metrics.epochs),
    )
    bare = dict.fromkeys(name.removeprefix(_VALIDATION) for name in names)
    return sorted(bare, key=lambda name: name != "loss")


def metric(history: History, name: str) -> ET.Element:
    """One metric over the steps: for each rank, whole epochs and the validation."""
    lines = [
        ChartLine("one rank's rows, within the epoch", points, MUTED)
        for samples in list(history.samples_of().values())[:_MOST_LINES]
        if (points := _by_step(samples, name))
    ]
    for colour, (label, key) in enumerate(
        (("all rows of an epoch", name), ("validation", f"{_VALIDATION}{name}"))
    ):
        if points := _epochs(history, key):
            dashed = key != name
            lines.append(ChartLine(label, points, colour, dashed=dashed, marked=True))
    values = [value for line in lines for value in _values(line.points)]
    extent = "which is never a finite number"
    if values:
        extent = f"between {min(values):.4g} and {max(values):.4g}"
    svg = charts.line_chart(
        lines, x="step", y="", alt=f"{name} over the steps, {extent}", from_zero=False
    )
    return _figure(name, svg, lines)


def over_time(
    history: History,
    title: str,
    value: Callable[[Sample], float | None],
    *,
    y: str = "",
    text: Callable[[float], str] | None = None,
    note: str = "",
) -> ET.Element | None:
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
        if _values(points):
            by_task[task] = points
    if not by_task:
        return None
    write = text or (lambda number: f"{number:.1f}")
    values = [number for points in by_task.values() for number in _values(points)]
    lines = _told_apart(by_task)
    svg = charts.line_chart(
        lines,
        x="time since the start",
        y=y,
        x_text=clock,
        y_text=text,
        alt=f"{title} of {plural(len(by_task), 'task')} over the time, "
        f"between {write(min(values))} and {write(max(values))}",
    )
    return _figure(title, svg, lines, note=note)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def waiting(history: History) -> ET.Element | None:
    """How much each rank waits; the rank that waits least is the slowest."""
    shares = {
        task: statistics.fmean(waits)
        for task, samples in history.samples_of().items()
        if (waits := [s.wait_share for s in samples if s.wait_share is not None])
    }
    if len(shares) < 2:
        return None
    slowest = min(shares, key=lambda task: shares[task])
    note = "All ranks wait about equally long: none is much slower than the others."
    if max(shares.values()) - shares[slowest] >= _ENOUGH_WAITING:
        note = f"{slowest} waits least, so the others wait for it: it is the slowest."
    return over_time(
        history,
        "Share of the time spent waiting for others",
        lambda sample: sample.wait_share,
        text=percent,
        note=note,
    )


def exchanges(history: History) -> ET.Element | None:
    """The cost of exchanges between ranks by purpose, as a table."""
    sums: dict[str, ExchangeTotal] = {}
    for total in chain.from_iterable(history.metrics.exchanges.values()):
        before = sums.get(total.what, ExchangeTotal(what=total.what))
        sums[total.what] = ExchangeTotal(
            what=total.what,
            count=before.count + total.count,
            seconds=before.seconds + total.seconds,
            bytes=before.bytes + total.bytes,
        )
    if not sums:
        return None
    ordered = sorted(sums.values(), key=lambda total: -total.seconds)
    return table(
        ("purpose", "exchanges", "size of one", "bytes", "time of one", "time"),
        [
            (
                total.what,
                f"{total.count:,}",
                byte_size(total.bytes // max(total.count, 1)),
                byte_size(total.bytes),
                f"{1000 * total.seconds / max(total.count, 1):.2f} ms",
                duration(total.seconds),
            )
            for total in ordered
        ],
        caption="Exchanges of all ranks together; times include waiting for others",
        numbers=(1, 2, 3, 4, 5),
    )


def _figure(
    title: str, svg: ET.Element, drawn: Sequence[ChartLine | Block], *, note: str = ""
) -> ET.Element:
    """A picture with a legend of what is ``drawn``; one with blocks is wide."""
    small: list[Content] = [element("small", note)] if note else []
    wide = any(isinstance(part, Block) for part in drawn)
    picture = svg
    if wide:  # On a narrow screen, its words would be too small to read.
        picture = element("div", svg, class_="scroll", tabindex="0")
    parts: list[Content] = [element("figcaption", title, *small), picture]
    if drawn:
        entries = {part.label: _legend_entry(part) for part in drawn}
        parts.append(element("ul", *entries.values(), class_="legend"))
    return element("figure", *parts, **({"class_": "wide"} if wide else {}))


def _legend_entry(part: ChartLine | Block) -> ET.Element:
    colour = "var(--muted)" if part.colour == MUTED else f"var(--c{part.colour})"
    kind = "key block" if isinstance(part, Block) else "key"
    if isinstance(part, ChartLine) and part.dashed:
        kind = "key dashed"
    swatch = element("span", class_=kind, style=f"color: {colour}", aria_hidden="true")
    return element("li", swatch, element("span", part.label))


def _told_apart(by_task: Mapping[str, list[Point]]) -> list[ChartLine]:
    """A colour for each task; if there are many, only for the lowest and highest."""
    if len(by_task) <= COLOURS:
        pairs = enumerate(by_task.items())
        return [ChartLine(task, points, number) for number, (task, points) in pairs]
    order = sorted(by_task, key=lambda task: statistics.fmean(_values(by_task[task])))
    low, *others, high = order
    rest = plural(len(others), "other")
    if len(others) > _MOST_LINES:
        rest += f", of which {_MOST_LINES} are shown"
    return [
        *(ChartLine(rest, by_task[task], MUTED) for task in others[:_MOST_LINES]),
        ChartLine(f"{low} (lowest)", by_task[low], 1),
        ChartLine(f"{high} (highest)", by_task[high], 0),
    ]


def _by_step(samples: Sequence[Sample], name: str) -> list[Point]:
    """A metric over steps, with gaps between epochs and attempts; [] without values."""
    points: list[Point] = []
    before: Sample | None = None
    for sample in samples:
        if sample.step is None or not sample.metrics:
            continue
        if before is not None and sample.step == before.step:
            continue
        place = sample.epoch, sample.attempt
        if before is not None and place != (before.epoch, before.attempt):
            points.append((sample.step, None))
        points.append((sample.step, sample.metrics.get(name)))
        before = sample
    return points if _values(points) else []


def _epochs(history: History, name: str) -> list[Point]:
    """A metric at the ends of epochs; [] if it is never a number."""
    points: list[Point] = []
    attempt = 0
    for epoch in _first_task_epochs(history):
        if name in epoch.metrics and epoch.step is not None:
            if epoch.attempt != attempt:
                points.append((epoch.step, None))
                attempt = epoch.attempt
            points.append((epoch.step, epoch.metrics[name]))
    return points if _values(points) else []


def _first_task_epochs(history: History) -> list[EpochEnd]:
    """The epochs as the first rank has reported them: all ranks report the same."""
    by_task: dict[str, list[EpochEnd]] = {task.task: [] for task in history.view.tasks}
    for epoch in history.metrics.epochs:
        by_task.setdefault(epoch.task, []).append(epoch)
    return next((epochs for epochs in by_task.values() if epochs), [])


def _values(points: Sequence[Point]) -> list[float]:
    return [value for _, value in points if value is not None]
