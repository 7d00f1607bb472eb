"""Draws the pictures of a report with matplotlib, as SVG elements. Pure.

Their colours are variables of the page's style, so that they suit light and dark mode.
"""

from __future__ import annotations

import io
import re
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tfcluster.console.sanitise import sanitise_word
from tfcluster.report.html import COLOURS

MUTED = -1
"""The colour of lines that are not distinguished."""

_INK, _RULE, _MUTED = "#010101", "#010102", "#010103"
_SERIES = tuple(f"#0102{number:02d}" for number in range(COLOURS))
_VARIABLES = {
    _INK: "currentColor",
    _RULE: "var(--rule)",
    _MUTED: "var(--muted)",
    **{colour: f"var(--c{number})" for number, colour in enumerate(_SERIES)},
}
_COLOUR = re.compile("|".join(_VARIABLES))
_WIDTH_IN = 6.0
_HEIGHT_IN = 2.9
_WIDE_IN = 10.5
_ROW_IN = 0.3
_MOST_POINTS = 400
_LABEL_CHARS = 24
_TICKS = 6
_STEPS = (1, 2, 2.5, 5, 10)

_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tfcluster",
    "font.size": 12,
    # Names of metrics and tasks are never formulas, whatever is in them.
    "text.parse_math": False,
    "text.color": _INK,
    "axes.edgecolor": _RULE,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _RULE,
    "xtick.color": _RULE,
    "ytick.color": _RULE,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
}

Point = tuple[float, float | None]
"""x and y; if y is None, the line has a gap."""
Text = Callable[[float], str]
"""Returns the text of a number at an axis."""


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A line of a picture."""

    points: Sequence[Point]
    colour: int = 0
    """0 to COLOURS - 1, or MUTED."""
    dashed: bool = False
    marked: bool = False
    """Whether each point has a mark."""


@dataclass(frozen=True, slots=True)
class Block:
    """A period in a row of a timeline."""

    row: int
    start: float
    end: float
    colour: int


def line_chart(
    lines: Sequence[ChartLine],
    *,
    x: str,
    y: str,
    alt: str,
    x_text: Text | None = None,
    y_text: Text | None = None,
    from_zero: bool = True,
) -> ET.Element:
    """Lines over a common axis."""
    with _axes(_WIDTH_IN, _HEIGHT_IN) as (figure, axes):
        for line in lines:
            points = downsampled(line.points, _MOST_POINTS)
            axes.plot(
                [point[0] for point in points],
                [float("nan") if p[1] is None else p[1] for p in points],
                color=_colour(line.colour),
                linestyle="--" if line.dashed else "-",
                linewidth=1.0 if line.colour == MUTED else 2.0,
                marker="o",
                markevery=None if line.marked else _alone(points),
                markersize=4,
                zorder=1 if line.colour == MUTED else 2,
            )
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if from_zero:
            axes.set_ylim(bottom=0)
        _label(axes, x_text, y_text, whole_x=x_text is None)
        return _svg(figure, alt)


def bar_chart(
    bars: Sequence[tuple[str, float]],
    *,
    x: str,
    alt: str,
    x_text: Text | None = None,
    most: float | None = None,
    marked: int | None = None,
) -> ET.Element:
    """Horizontal bars, the first on top; the bar with number ``marked`` stands out."""
    labels = [_short(label) for label, _ in bars]
    height = max(1.2, 0.8 + _row_in(labels) * len(bars))
    with _axes(_WIDTH_IN, height) as (figure, axes):
        colours = [_colour(1 if i == marked else 0) for i in range(len(bars))]
        values = [value for _, value in bars]
        axes.barh(range(len(bars)), values, color=colours, height=0.7)
        _name_rows(axes, labels)
        axes.set_xlim(0, most)
        axes.set_xlabel(x)
        _label(axes, x_text, None)
        return _svg(figure, alt)


def timeline(
    rows: Sequence[str], blocks: Sequence[Block], *, x: str, alt: str, x_text: Text
) -> ET.Element:
    """A row for each name, with blocks for the periods in which something lasted."""
    labels = [_short(row) for row in rows]
    height = max(1.4, 0.9 + _row_in(labels) * len(rows))
    with _axes(_WIDE_IN, height) as (figure, axes):
        for block in blocks:
            axes.broken_barh(
                [(block.start, max(block.end - block.start, 1e-9))],
                (block.row - 0.35, 0.7),
                facecolors=_colour(block.colour),
                edgecolors=_colour(block.colour),
                linewidth=0.8,
            )
        _name_rows(axes, labels)
        axes.set_xlim(left=0)
        axes.set_xlabel(x)
        _label(axes, x_text, None)
        return _svg(figure, alt)


def _name_rows(axes: Axes, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def downsampled(points: Sequence[Point], most: int) -> list[Point]:
    """About ``most`` points at most: the lowest and highest of each part, in order."""
    if len(points) <= most:
        return list(points)
    width = -(-2 * len(points) // most)
    kept_points = []
    for start in range(0, len(points), width):
        part = range(start, min(start + width, len(points)))
        known = [i for i in part if points[i][1] is not None]
        kept = {part[0]}
        if known:
            kept = {
                min(known, key=lambda i: points[i][1] or 0.0),
                max(known, key=lambda i: points[i][1] or 0.0),
            }
        kept_points += [points[i] for i in sorted(kept)]
    return kept_points


@contextmanager
def _axes(width_in: float, height_in: float) -> Iterator[tuple[Figure, Axes]]:
    # The user's own matplotlib settings have no effect.
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_SETTINGS)
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        yield figure, figure.add_subplot()


def _alone(points: Sequence[Point]) -> list[int]:
    """The points without a neighbour, which a line does not show."""
    known = [False, *(point[1] is not None for point in points), False]
    return [
        place
        for place in range(len(points))
        if known[place + 1] and not (known[place] or known[place + 2])
    ]


def _label(
    axes: Axes, x_text: Text | None, y_text: Text | None, *, whole_x: bool = False
) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(_TICKS, integer=whole_x, steps=_STEPS))
    for axis, text, ends in (
        (axes.xaxis, x_text, axes.get_xlim()),
        (axes.yaxis, y_text, axes.get_ylim()),
    ):
        if text is not None:
            low, high = sorted(ends)
            places = _different(low, high, text)
            axis.set_ticks(places, [text(place) for place in places])


def _different(low: float, high: float, text: Text) -> list[float]:
    """Places of ticks whose texts differ: fewer of them if there are few texts."""
    places: list[float] = []
    for count in range(_TICKS, 0, -1):
        ticks = MaxNLocator(count, steps=_STEPS).tick_values(low, high)
        places = [float(place) for place in ticks if low <= place <= high]
        if len({text(place) for place in places}) == len(places):
            return places
    return list({text(place): place for place in reversed(places)}.values())[::-1]


def _short(label: str) -> str:
    """``label`` in at most two lines."""
    label = sanitise_word(label)
    if len(label) > _LABEL_CHARS:
        lines = textwrap.wrap(label, _LABEL_CHARS, max_lines=2, placeholder="…")
        label = "\n".join(lines)
    return label


def _row_in(labels: Sequence[str]) -> float:
    """The height of a row with such a label."""
    return _ROW_IN * (1.4 if any("\n" in label for label in labels) else 1.0)


def _colour(number: int) -> str:
    return _MUTED if number == MUTED else _SERIES[number % COLOURS]


def _svg(figure: Figure, alt: str) -> ET.Element:
    data = io.BytesIO()
    figure.savefig(data, format="svg", transparent=True, metadata={"Date": None})
    root = ET.fromstring(data.getvalue())
    for parent in root.iter():
        for child in list(parent):
            # A style inside a picture would apply to the whole page.
            if _plain(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for each in root.iter():
        each.tag = _plain(each.tag)
        if each.tag == "g":
            each.attrib.pop("id", None)  # all pictures have the same ids
        attributes = {_plain(name): value for name, value in each.attrib.items()}
        each.attrib.clear()
        for name, value in attributes.items():
            each.set(name, _COLOUR.sub(lambda m: _VARIABLES[m[0]], value))
    root.set("role", "img")
    root.set("aria-label", sanitise_word(alt))
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    return root


def _plain(name: str) -> str:
    """A name without its namespace: HTML knows SVG names without namespaces."""
    return name.rpartition("}")[2]
