"""Tests of columns, durations, folded names and colours."""

from __future__ import annotations

import io
import os
import pty

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfcluster.console.display import PLAIN, Style, style_of
from tfcluster.console.text import (
    clock,
    cut,
    duration,
    fold_tasks,
    plural,
    table,
    width,
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1, "0.0 s"),
        (0.44, "0.4 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.4, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (7380, "2 h 03 min"),
        (86_399, "23 h 59 min"),
        (86_400, "1 d 00 h"),
        (457_200, "5 d 07 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (151, "2:31"), (3751.9, "1:02:31"), (-5, "0:00")]
)
def test_clocks(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_plurals() -> None:
    assert plural(1, "line") == "1 line"
    assert plural(1234, "line") == "1,234 lines"


@pytest.mark.parametrize(
    ("tasks", "text"),
    [
        ([], ""),
        (["worker:3"], "worker:3"),
        ([f"worker:{i}" for i in range(32)], "worker:[0-31]"),
        (["ps:1", "worker:7", "worker:0", "worker:1", "chief:0"],
         "chief:0,worker:[0-1,7],ps:1"),
    ],
)  # fmt: skip
def test_task_names_are_folded_by_type(tasks: list[str], text: str) -> None:
    assert fold_tasks(tasks) == text


@given(st.text(), st.integers(0, 20))
def test_cut_text_fits(text: str, columns: int) -> None:
    shown = cut(text, columns)
    assert width(shown) <= columns
    assert shown == text or shown.endswith("…") or not columns


def test_wide_characters_take_two_columns() -> None:
    assert width("漢字") == 4
    assert width("e\u0301") == 1
    assert cut("漢字漢字", 5) == "漢字…"


def test_a_table() -> None:
    rows = [("a", "", "1"), ("漢", "", "100"), ("ccc", "", "")]
    assert table(rows, ("name", "empty", "n"), right=(2,)) == [
        "name    n",
        "a       1",
        "漢    100",
        "ccc",
    ]
    assert table([], ("name",)) == []


def test_colours_take_no_columns_of_a_table() -> None:
    red = Style(colours=True).red("a")
    assert table([(red, "b"), ("ccc", "d")]) == [f"{red}    b", "ccc  d"]


# --- colours -------------------------------------------------------------------------


def test_without_colours_text_stays_as_it_is() -> None:
    assert PLAIN.red("x") == PLAIN.bold("x") == "x"
    assert Style(width=8).prefix("ps:0") == "ps:0     | "


def test_a_task_has_one_colour_and_neighbours_have_others() -> None:
    style = Style(colours=True)
    tasks = ["chief:0", *(f"worker:{i}" for i in range(5))]
    colours = [style.prefix(task).partition("m")[0] for task in tasks]
    assert colours == [style.prefix(task).partition("m")[0] for task in tasks]
    assert len(set(colours)) == len(tasks)
    assert "\x1b[31m" not in colours  # red is for failures
    style.prefix("what?")


def test_colours_are_for_terminals_that_want_them() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        assert style_of(terminal, {"TERM": "xterm"}).colours
        assert style_of(terminal, {"NO_COLOR": ""}).colours  # no-color.org: not empty
        assert not style_of(terminal, {"NO_COLOR": "1"}).colours
        assert not style_of(terminal, {"TERM": "dumb"}).colours
    os.close(ours)
    assert not style_of(terminal, {}).colours  # closed
    assert not style_of(io.StringIO(), {}).colours
    assert style_of(None, {}, ["ps:0", "worker:10"]) == Style(width=9)
