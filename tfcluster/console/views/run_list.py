"""The table of runs that ``list`` prints. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tfcluster.console.sanitise import sanitise_word
from tfcluster.console.style import PLAIN, Style
from tfcluster.console.text import duration, table
from tfcluster.console.views.status import clock_time, state_words
from tfcluster.record.run_status import RunView

_HEADER = ("run", "backend", "began", "took", "state")


def run_list(views: Sequence[RunView], now_s: float, style: Style = PLAIN) -> list[str]:
    """A header and one line for each run, in the given order."""
    rows = [_row(view, now_s, style) for view in views]

    def paint(row: int, column: int, cell: str) -> str:
        return style.dim(cell) if row < 0 else cell

    return table(rows, _HEADER, right=(3,), paint=paint)


def _row(view: RunView, now_s: float, style: Style) -> tuple[str, ...]:
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
