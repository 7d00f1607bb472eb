"""What tasks have recorded is read again, whatever is missing from it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tfcluster.runtime.telemetry.tracer import TracedSpan, encoded
from tfcluster.trace.spans import HostClock, Item, Moment, Span, recorded

CLOCKS = {"h1": HostClock(((0.0, 1_000_000.0),), 0.001)}


def _event(number: int, **others: Any) -> TracedSpan:
    began_s = float(number)
    known: dict[str, Any] = {
        "number": number,
        "row": "steps",
        "name": "step",
        "began_s": began_s,
        "ended_s": began_s + 0.5,
        "amount": number,
        "how": "",
        "waited_s": 0.0,
        "arrived_s": 0.0,
    }
    return TracedSpan(**{**known, **others})


def _line(*events: TracedSpan, **others: Any) -> bytes:
    batch = {"attempt": 0, "host": "h1", **vars(encoded(events)), **others}
    return json.dumps(batch).encode()


def _read(*lines: bytes) -> list[Item]:
    return list(recorded(lines, CLOCKS))


def test_a_step_is_read_again() -> None:
    assert _read(_line(_event(0, amount=7, began_s=2.0, ended_s=2.25))) == [
        Span("steps", "step", 3_000_000, 3_250_000, {"step": 7})
    ]


def test_an_exchange_is_read_again() -> None:
    exchange = _event(
        0,
        row="exchanges",
        name="gradients of adam",
        amount=4096,
        how="host",
        waited_s=0.002,
        arrived_s=0.001,
    )
    args = {
        "bytes": 4096,
        "transport": "host",
        "arrived_ms": 1.0,
        "waited_ms": 2.0,
    }
    assert _read(_line(exchange)) == [
        Span("exchanges", "gradients of adam", 1_000_000, 1_500_000, args)
    ]


def test_exchanges_in_a_graph_are_counted() -> None:
    graph = _event(0, row="exchanges", name="graph with gradients", amount=3)
    (found,) = _read(_line(graph))
    assert found.args == {"exchanges": 3}


def test_what_is_missing_is_said() -> None:
    found = _read(_line(_event(0), _event(1)), _line(_event(5)))
    assert Moment("steps", "3 events are missing", 6_000_000) in found


def test_a_new_attempt_begins_anew() -> None:
    found = _read(_line(_event(4)), _line(_event(0), attempt=1), _line(_event(1)))
    assert not [each for each in found if isinstance(each, Moment)]


def test_torn_and_wrong_lines_are_left_out() -> None:
    good = _line(_event(0))
    wrong = [
        good[:-20],
        b"",
        b"[]",
        b"null",
        b'{"attempt": 0}',
        _line(_event(1), events="[[0,1,0"),
        _line(_event(1), events="[[0,9,0,1]]"),
        _line(_event(1), events='[["a",9,0,1]]'),
        _line(_event(1), names=7),
        _line(_event(1), base_us="x"),
        _line(_event(1), host="h2"),
    ]
    assert len(_read(*wrong, good)) == 1


@pytest.mark.parametrize(
    "row",
    [
        "[0,1,1e400,5,1]",
        "[0,1,-9000000,5,1]",  # before the host's clock began
        f"[0,1,{10**400},5,1]",
        "[0,1,0,-5,1]",
        "[0,1,0,0.5,1]",
        "[0,1,0,5,NaN]",
        "[0,1,0,5,[2]]",
        "[0,1,0,5,1,1,Infinity,0]",
        "[" * 100_000,
    ],
)
def test_numbers_that_no_task_measures_are_left_out(row: str) -> None:
    good = _line(_event(0))
    assert len(_read(_line(_event(1), events=f"[{row}]"), good)) == 1
    assert _read(b"[" * 100_000, good) == _read(good)


def test_times_keep_their_order_when_they_are_rounded() -> None:
    inner = _event(0, began_s=1.0000004, ended_s=1.9999996)
    outer = _event(1, began_s=1.0000003, ended_s=1.9999997)
    first, second = _read(_line(inner, outer))
    assert isinstance(first, Span)
    assert isinstance(second, Span)
    assert second.began_us <= first.began_us
    assert first.ended_us <= second.ended_us
