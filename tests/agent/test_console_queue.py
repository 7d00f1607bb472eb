from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tfcluster.agent.console_lines import Chunk, ConsoleQueue, Source

A, B = ("a", 0), ("b", 0)


def taken(backlog: ConsoleQueue) -> list[Chunk]:
    chunks = []
    while (chunk := backlog.pop()) is not None:
        chunks.append(chunk)
    return chunks


def test_lines_of_one_source_travel_together() -> None:
    backlog = ConsoleQueue()
    backlog.put(A, ["1"])
    backlog.put(A, ["2"])
    backlog.put(B, ["3"])
    backlog.put(A, ["4"])
    shown = [(c.source, c.lines) for c in taken(backlog)]
    assert shown == [(A, ["1", "2"]), (B, ["3"]), (A, ["4"])]


def test_a_count_stands_before_the_lines_that_follow() -> None:
    backlog = ConsoleQueue()
    backlog.put(A, ["1"])
    backlog.drop(A, 5)
    backlog.drop(A, 1)
    backlog.put(B, ["other"])
    backlog.put(A, ["7"])
    shown = [(c.lines, c.dropped) for c in taken(backlog)]
    assert shown == [(["1"], 0), (["other"], 0), (["7"], 6)]


def test_a_count_that_nothing_follows_is_settled_once() -> None:
    backlog = ConsoleQueue()
    backlog.drop(A, 2)
    assert backlog.settle(A)
    assert not backlog.settle(A)
    assert [(c.lines, c.dropped) for c in taken(backlog)] == [([], 2)]


def test_a_large_chunk_is_one_frame_at_most() -> None:
    backlog = ConsoleQueue()
    backlog.put(A, ["x" * 16384] * 30)
    assert all(c.cost < 100_000 for c in taken(backlog))


def test_the_oldest_lines_go_and_are_counted() -> None:
    backlog = ConsoleQueue(limit=100_000)
    for number in range(40):
        backlog.put(A, [f"{number:05} é" + "x" * 9000])
    chunks = taken(backlog)
    lines = [line for chunk in chunks for line in chunk.lines]
    assert lines[-1].startswith("00039")
    assert chunks[0].dropped == 40 - len(lines) > 0
    assert sum(chunk.cost for chunk in chunks) <= 100_000


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 3), st.booleans())))
def test_every_line_is_shown_or_counted(
    steps: list[tuple[Source, int, bool]],
) -> None:
    backlog = ConsoleQueue(limit=400)
    for source, count, shown in steps:
        if shown:
            backlog.put(source, ["x" * 30] * count)
        else:
            backlog.drop(source, count)
    backlog.settle(A)
    backlog.settle(B)
    chunks = taken(backlog)
    for source in (A, B):
        mine = [c for c in chunks if c.source == source]
        total = sum(count for who, count, _ in steps if who == source)
        assert sum(len(c.lines) + c.dropped for c in mine) == total
