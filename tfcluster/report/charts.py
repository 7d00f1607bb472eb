"""Draws the pictures of a report with matplotlib, as SVG elements. Pure.

Their colours are variables of the page's style, so that they suit light and dark mode.
"""

from __future__ import annotations

import io
import re
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
    """A line of a picture; lines with the same label share an entry of the legend."""

    label: str
    points: Sequence[Point]
    colour: int = 0
    """0 to COLOURS - 1, or MUTED."""
    dashed: bool = False
    marked: bool = False
    """Whether each point has a mark."""


@dataclass(frozen=True, slots=True)
class Block:
    """A period in a row of a timeline."""

    label: str
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
    """Lines over a common axis of steps or seconds."""
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
        axes.set_ylabel(y)
        if from_zero:
            axes.set_ylim(bottom=0)
        if y_text is not None:
            axes.yaxis.set_major_formatter(lambda value, _: y_text(value))
        _label_x(axes, x, x_text)
        return _svg(figure, alt)


def timeline(
    rows: Sequence[str], blocks: Sequence[Block], *, x: str, alt: str, x_text: Text
) -> ET.Element:
    labels = [sanitise_word(row) for row in rows]
    with _axes(_WIDE_IN, max(1.3, 0.9 + _ROW_IN * len(rows))) as (figure, axes):
        for block in blocks:
            axes.broken_barh(
                [(block.start, max(block.end - block.start, 1e-9))],
                (block.row - 0.35, 0.7),
                facecolors=_colour(block.colour),
                edgecolors=_colour(block.colour),
                linewidth=0.8,
            )
        axes.set_yticks(range(len(labels)), labels)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(labels) - 0.4, -0.6)
        axes.set_xlim(left=0)
        _label_x(axes, x, x_text)
        return _svg(figure, alt)


def downsampled(points: Sequence[Point], most: int) -> list[Point]:
    """About ``most`` points at most: the lowest and highest of each part, in order."""
    if len(points) <= most:
        return list(points)
    width = -(-2 * len(points) // most)
    kept_points = []
    for start in range(0, len(points), width):
        part = range(start, min(start + width, len(points)))
        finite = [i for i in part if points[i][1] is not None]
        kept = {part[0]}
        if finite:
            kept = {
                min(finite, key=lambda i: points[i][1] or 0.0),
                max(finite, key=lambda i: points[i][1] or 0.0),
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
    finite = [False, *(point[1] is not None for point in points), False]
    return [
        place
        for place in range(len(points))
        if finite[place + 1] and not (finite[place] or finite[place + 2])
    ]


def _label_x(axes: Axes, name: str, text: Text | None) -> None:
    axes.set_xlabel(name)
    axes.xaxis.set_major_locator(
        MaxNLocator(_TICKS, integer=True, steps=_STEPS, min_n_ticks=1)
    )
    if text is not None:
        axes.xaxis.set_major_formatter(lambda value, _: text(value))


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
    for node in root.iter():
        node.tag = _plain(node.tag)
        if node.tag == "g":
            node.attrib.pop("id", None)  # all pictures have the same ids
        attributes = {_plain(name): value for name, value in node.attrib.items()}
        node.attrib.clear()
        for name, value in attributes.items():
            node.set(name, _COLOUR.sub(lambda m: _VARIABLES[m[0]], value))
    root.set("role", "img")
    root.set("aria-label", sanitise_word(alt))
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    return root


def _plain(name: str) -> str:
    """A name without its namespace: HTML knows SVG names without namespaces."""
    return name.rpartition("}")[2]
