"""What is written keeps the rules of the format, whatever has happened."""

from __future__ import annotations

import json
import random

import pytest

from tests.trace.rules import Trace
from tfcluster.trace.spans import Moment, Process, Span, lanes, pieces


def _written(*processes: Process, start_us: int = 0) -> Trace:
    return Trace("".join(pieces(processes, start_us, {"run": "a"})))


def test_spans_and_moments_are_in_rows_of_processes() -> None:
    trace = _written(
        Process(
            "worker:0 on h1",
            (
                Span("steps", "step", 1_000, 1_500, {"step": 1}),
                Span("exchanges", "mean", 1_100, 1_200),
                Moment("steps", "lost", 1_600),
            ),
            label="clock ±1 ms",
        ),
        Process("worker:1 on h2", ()),
        start_us=400,
    )
    assert trace.facts == {"run": "a"}
    assert set(trace.processes.values()) == {"worker:0 on h1", "worker:1 on h2"}
    assert set(trace.rows) == {"worker:0 on h1"}
    steps = trace.rows["worker:0 on h1"]["steps"]
    assert [(e["ph"], e["ts"], e["name"]) for e in steps] == [
        ("X", 600, "step"),
        ("i", 1200, "lost"),
    ]
    assert steps[0]["dur"] == 500
    assert steps[0]["args"] == {"step": 1}
    assert trace.names("worker:0 on h1", "exchanges") == ["mean"]


def test_nothing_at_all_is_a_trace() -> None:
    assert _written().events == []


def test_spans_that_overlap_in_part_get_rows_of_their_own() -> None:
    spans = (
        Span("exchanges", "a", 0, 10),
        Span("exchanges", "inside", 2, 4),
        Span("exchanges", "b", 5, 15),
        Span("exchanges", "c", 15, 20),
    )
    trace = _written(Process("p", spans))
    assert trace.names("p", "exchanges") == ["a", "inside", "c"]
    assert trace.names("p", "exchanges (2)") == ["b"]


@pytest.mark.parametrize("seed", range(20))
def test_any_spans_keep_the_rules(seed: int) -> None:
    chance = random.Random(seed)
    spans = []
    for _ in range(200):
        began = chance.randrange(300)
        spans.append(Span("row", "x", began, began + chance.randrange(40)))
    assert len(list(lanes(spans))) == len(spans)
    trace = _written(Process("p", tuple(spans)))
    assert sum(map(len, trace.rows["p"].values())) == len(spans)


def test_text_of_programs_stays_json() -> None:
    name = 'a "b" \\ \n é \x1b[31m \ud800'
    text = "".join(pieces([Process(name, (Moment("r", name, 0),))], 0, {}))
    assert json.loads(text)["traceEvents"][0]["args"] == {"name": name}
    assert text.isascii()
