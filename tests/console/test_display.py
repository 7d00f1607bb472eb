"""Tests of what the user has chosen to see."""

from __future__ import annotations

import io
import time

from tfcluster.console.display import Display, is_debugging
from tfcluster.console.screen import Screen


def test_a_line_begins_with_the_local_time() -> None:
    now_s = time.mktime((2026, 1, 2, 3, 4, 5, 0, 2, -1)) + 0.0625
    assert Display(timestamps=True).stamp(now_s) == "03:04:05.062 "
    assert Display().stamp(now_s) == ""


def test_colours_can_be_forced_and_forbidden() -> None:
    shown = {}
    for colours in (True, False, None):
        out = io.StringIO()
        display = Display(colours=colours)
        screen = Screen(out, io.StringIO(), environ={"NO_COLOR": "1"}, display=display)
        screen.log("worker:0", ["hello"])
        assert screen.close(10.0)
        shown[colours] = out.getvalue()
    assert shown[True] == "\x1b[33mworker:0\x1b[0m | hello\n"
    assert shown[False] == shown[None] == "worker:0 | hello\n"


def test_a_variable_asks_for_everything() -> None:
    assert is_debugging({"TFCLUSTER_DEBUG": "1"})
    assert not is_debugging({"TFCLUSTER_DEBUG": "0"})
    assert not is_debugging({})
