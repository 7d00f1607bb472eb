"""Tests of showing once what several ranks print."""

from __future__ import annotations

from tfcluster.console.line_folding import WAIT_S, LineFolding, Shown

RANKS = ("worker:1", "worker:0", "ps:0", "worker:2")


def test_the_first_rank_is_shown_at_once_and_equal_lines_of_others_are_not() -> None:
    folding = LineFolding(RANKS)
    assert folding.add("worker:0", ["a", "b"], 0) == [Shown("worker:0", 0, ["a", "b"])]
    assert folding.add("worker:1", ["a", "b"], 0) == []
    assert folding.due(10) == folding.rest() == []


def test_lines_wait_for_the_first_rank() -> None:
    folding = LineFolding(RANKS)
    for task in ("worker:1", "worker:2"):
        assert folding.add(task, ["a"], 0) == []
    assert folding.add("worker:0", ["a"], 0.5) == [Shown("worker:0", 2, ["a"])]
    assert folding.rest() == []


def test_a_line_of_its_own_is_shown_after_a_moment() -> None:
    folding = LineFolding(RANKS)
    folding.add("worker:1", ["mine", "ours"], 0)
    folding.add("worker:2", ["ours"], 0)
    assert folding.due(WAIT_S / 2) == []
    assert folding.due(WAIT_S) == [
        Shown("worker:1", 0, ["mine"]),
        Shown("worker:1", 1, ["ours"]),
    ]
    # Its own repetitions are news.
    folding.add("worker:1", ["mine", "mine"], 2)
    shown = [*folding.due(2 + WAIT_S), *folding.rest()]
    assert sum(len(each.lines) for each in shown) == 1
    assert folding.add("ps:0", ["mine"], 2) == [Shown("ps:0", 0, ["mine"])]


def test_one_rank_or_none_has_nothing_to_fold() -> None:
    for tasks in ((), ("worker:0", "ps:0", "evaluator:0")):
        folding = LineFolding(tasks)
        assert folding.first is None
        for _ in range(2):
            assert folding.add("worker:0", ["a"], 0) == [Shown("worker:0", 0, ["a"])]


def test_the_number_of_waiting_lines_is_bounded() -> None:
    folding = LineFolding(RANKS)
    lines = [str(number) for number in range(5_000)]
    shown = folding.add("worker:1", lines, 0)
    assert len(shown) == 1
    assert 3_000 < len(shown[0].lines) < 5_000
    assert (
        sum(len(each.lines) for each in folding.rest()) + len(shown[0].lines) == 5_000
    )
