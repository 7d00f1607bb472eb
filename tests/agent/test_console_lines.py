from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfcluster.agent.console_lines import Budget, ConsoleLines, Tail, shorten, visible

EVERYTHING = 1 << 30
OUTPUT = st.text("ab\r\n", max_size=8).map(str.encode) | st.binary(max_size=8)


def fed(*parts: bytes, room: int = EVERYTHING) -> list[bytes]:
    """Return the lines that come out, including an unfinished last one."""
    console = ConsoleLines()
    lines: list[bytes] = []
    for part in parts:
        lines += console.feed(part, room)[0]
    last = console.finish()
    return lines if last is None else [*lines, last]


@pytest.mark.parametrize(
    ("parts", "lines"),
    [
        ([b"a\nb\n"], [b"a", b"b"]),
        ([b"a\n\nb"], [b"a", b"", b"b"]),
        ([b"a\r\nb\r\n"], [b"a", b"b"]),
        ([b"a\r", b"\nb\n"], [b"a", b"b"]),
        ([b"par", b"tial", b" line\n"], [b"partial line"]),
        ([b"10%\r20%\r30%\n"], [b"30%"]),
        ([b"\r10%", b"\r20%", b"\r30%", b"\n"], [b"30%"]),
        ([b"10%\r", b"20%\r"], [b"20%"]),
        ([b"\xff\x00\xfe\n"], [b"\xff\x00\xfe"]),
        ([], []),
    ],
)
def test_lines_come_whole(parts: list[bytes], lines: list[bytes]) -> None:
    assert fed(*parts) == lines


def test_a_long_line_is_cut_and_its_rest_is_not_a_line() -> None:
    assert fed(b"x" * 20_000, b"x" * 20_000, b"\nnext\n") == [b"x" * 16384, b"next"]


def test_a_cut_leaves_no_half_character() -> None:
    line = ("x" * 16383 + "é").encode()
    assert shorten(line, 16384).decode() == "x" * 16383
    assert fed(line + b"tail", b"more\n")[0].decode() == "x" * 16383


def test_lines_over_the_budget_are_counted_exactly() -> None:
    console = ConsoleLines()
    assert console.feed(b"head of ", 5) == ([], 0)
    fed_lines = console.feed(b"one\ntwo\nthree\nfour\nrest", 2)
    assert fed_lines == ([b"head of one", b"two"], 2)
    assert console.finish() == b"rest"


def test_the_start_of_a_dropped_line_is_dropped_as_well() -> None:
    console = ConsoleLines()
    console.feed(b"begin", 9)
    assert console.feed(b" end\nnext", 0) == ([], 1)
    assert console.finish() == b"next"


def test_a_progress_bar_shows_its_newest_state_once_an_interval() -> None:
    console = ConsoleLines(interval_s=0.5)
    console.feed(b"1%\r2%\r", 9)
    assert console.update(10.0) == b"2%"
    console.feed(b"3%\r4%\r", 9)
    assert console.update(10.4) is None
    assert console.update(10.5) == b"4%"
    assert console.update(11.5) is None


@given(st.lists(OUTPUT))
def test_any_portions_give_the_same_lines_as_the_whole(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    assert fed(*parts) == fed(whole)


@given(st.lists(OUTPUT), st.integers(0, 5))
def test_every_line_is_shown_or_counted(parts: list[bytes], room: int) -> None:
    console = ConsoleLines()
    all_fed = [console.feed(part, room) for part in parts]
    counted = sum(len(lines) + dropped for lines, dropped in all_fed)
    assert counted == b"".join(parts).count(b"\n")


@given(st.lists(OUTPUT))
def test_the_tail_is_the_end_of_all_lines(parts: list[bytes]) -> None:
    tail = Tail(count=3, chars=50)
    for part in parts:
        tail.feed(part)
    whole = b"".join(parts)
    lines = [visible(line, 200) for line in whole.split(b"\n")]
    if not lines[-1]:
        lines.pop()
    shown = [line.decode("utf-8", "backslashreplace")[:50] for line in lines]
    assert tail.lines() == shown[-3:]


def test_the_tail_holds_little_of_endless_lines() -> None:
    tail = Tail()
    for _ in range(50):
        tail.feed(b"z" * (1 << 20))
    tail.feed(b"\nlast")
    assert tail.lines() == ["z" * 2000, "last"]


def test_a_budget_has_credit_for_a_second_and_refills() -> None:
    budget = Budget(per_s=1000, least=100)
    assert budget.room(0.0) == 10
    budget.spend([b""] * 10)
    assert budget.room(0.0) == 0
    assert budget.room(0.5) == 5
    assert budget.room(100.0) == 10
    budget.spend([b"x" * 1500])
    assert budget.room(100.0) == 0
    assert budget.room(100.4) == 0
    assert budget.room(101.0) > 0
