"""What a rank records: exchanges with bytes and waits, steps, bounded and in order."""

from __future__ import annotations

import json
import os
import socket
import threading
from typing import Any

import numpy as np
import pytest

from tests.kit.ranks import as_threads, results
from tests.runtime.test_step_rate import Clock
from tfcluster.protocol.frames import encode
from tfcluster.protocol.task_events import TraceMessage
from tfcluster.protocol.wire import parse
from tfcluster.runtime.collective import Group, ReduceOp, Signature
from tfcluster.runtime.collective.collectives import meet, reduce_arrays
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.telemetry import tracer as tracer_module
from tfcluster.runtime.telemetry.agent_channel import Reporter
from tfcluster.runtime.telemetry.step_rate import StepRate
from tfcluster.runtime.telemetry.tracer import WAITING_EVENTS, Tracer, span


class Heard:
    """Keeps the batches of a tracer."""

    def __init__(self, **options: Any) -> None:
        self.batches: list[dict[str, Any]] = []
        self.tracer = Tracer(self._say, **options)

    def _say(self, batch: TraceMessage) -> None:
        self.batches.append(parse(encode(batch)))

    def rows(self) -> list[list[Any]]:
        """All events: row, name, beginning and duration (µs), and the rest."""
        self.tracer.flush()
        found = []
        for batch in self.batches:
            names = batch["names"]
            for row, name, began_us, *rest in json.loads(batch["events"]):
                found.append(
                    [names[row], names[name], batch["base_us"] + began_us, *rest]
                )
        return found


def _rows_of_a_sum(*arrays: Array) -> list[list[list[Any]]]:
    """What each of two ranks records of an exchange that adds up these arrays."""

    def act(group: Group) -> list[list[Any]]:
        heard = Heard()
        group.tracer = heard.tracer
        reduce_arrays(group, arrays, ReduceOp.SUM, Signature("gradients"))
        return heard.rows()

    return results(as_threads(2, act))


def test_an_exchange_has_its_bytes_and_buckets() -> None:
    rows = _rows_of_a_sum(np.ones((3, 4), "float32"), np.ones(8192, "float32"))
    for bucket, exchange in rows:
        assert exchange[:2] == ["exchanges", "gradients"]
        # Its packed parts are aligned.
        assert bucket[4] == exchange[4] >= 4 * (12 + 8192)
        began_us, duration_us, arrived_us = exchange[2], exchange[3], exchange[-1]
        assert 0 < arrived_us <= duration_us
        assert bucket[:2] == ["exchanges", "bucket"]
        assert began_us + arrived_us <= bucket[2]
        assert bucket[2] + bucket[3] <= began_us + duration_us


def test_what_travels_with_the_header_counts_too() -> None:
    rows = _rows_of_a_sum(np.ones((3, 4), "float32"), np.ones(8, "float32"))
    for (exchange,) in rows:
        assert exchange[:2] == ["exchanges", "gradients"]
        assert exchange[4] == 4 * 20


def test_a_rank_that_waits_knows_how_long() -> None:
    """It is another rank that comes late."""

    def act(group: Group) -> int:
        meet(group, Signature("connected"))
        heard = Heard()
        group.tracer = heard.tracer
        if group.rank:
            threading.Event().wait(0.2)
        meet(group, Signature("barrier"))
        (row,) = heard.rows()
        arrived_us: int = row[-1]
        return arrived_us

    first, late = results(as_threads(2, act))
    assert first > 150_000
    assert late < first


def test_without_a_tracer_nothing_changes() -> None:
    def act(group: Group) -> bool:
        meet(group, Signature("barrier"))
        return group.tracer is None

    assert results(as_threads(2, act)) == [True, True]


def test_an_exchange_that_fails_is_recorded_too() -> None:
    def act(group: Group) -> list[list[Any]]:
        heard = Heard()
        group.tracer = heard.tracer
        with pytest.raises(ValueError, match="boom"), group.exchange(Signature("a")):
            raise ValueError("boom")
        return heard.rows()

    (rows,) = results(as_threads(1, act))
    assert [row[1] for row in rows] == ["a"]


def test_steps_follow_each_other() -> None:
    clock = Clock()
    heard = Heard(clock=clock)
    (group,) = results(as_threads(1, lambda group: group))
    rate = StepRate(Reporter(), group, clock, tracer=heard.tracer)
    for _ in range(3):
        clock.now += 0.25
        rate.applied("adam")
        rate.applied("other")
    # An evaluation is not a part of the next step.
    with span(heard.tracer, "fit, evaluate", "evaluate of model"):
        clock.now += 5
    clock.now += 0.5
    rate.applied("adam")
    rows = [[row[0], (row[2] - 100_000_000) / 1e6, *row[3:]] for row in heard.rows()]
    assert rows == [
        ["steps", 0.0, 250_000, 1],
        ["steps", 0.25, 250_000, 2],
        ["steps", 0.5, 250_000, 3],
        ["fit, evaluate", 0.75, 5_000_000],
        ["steps", 5.75, 500_000, 4],
    ]


def test_after_its_steps_a_tracer_is_off() -> None:
    heard = Heard(most_steps=2)
    for number in range(1, 5):
        heard.tracer.add("exchanges", "mean", 1.0, 2.0, 8, "host")
        heard.tracer.step(number)
    assert [row[0] for row in heard.rows()] == ["exchanges", "steps"] * 2
    assert not heard.tracer.on


def test_the_newest_events_are_kept_and_numbered() -> None:
    heard = Heard()
    # The thread that sends them must not come in between.
    with heard.tracer._lock:
        for number in range(WAITING_EVENTS + 100):
            heard.tracer.add("steps", "step", float(number), float(number))
    rows = heard.rows()
    assert len(rows) == WAITING_EVENTS
    assert rows[-1][2] == (WAITING_EVENTS + 99) * 1_000_000
    assert heard.batches[0]["first"] == 100
    assert heard.batches[-1]["last"] == WAITING_EVENTS + 99
    assert len(json.dumps(heard.batches[0])) < 100_000


def test_the_last_events_reach_an_agent_that_reads_late() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    theirs.settimeout(10)
    reporter = Reporter(ours)
    tracer = Tracer(reporter.send, reporter.drain)
    for number in range(4000):
        tracer.add("steps", "step", float(number), number + 0.5, number)
    ending = threading.Thread(target=tracer.finish)
    ending.start()
    with ours, theirs:
        data = b""
        while data.count(b"\n") < 4:
            data += theirs.recv(1 << 16)
        ending.join(10)
        assert not ending.is_alive()
    batches = [json.loads(line) for line in data.splitlines()]
    assert [batch["type"] for batch in batches] == ["trace"] * 4
    assert batches[-1]["last"] == 3999


def test_an_agent_that_does_not_read_does_not_hold_up_the_end() -> None:
    ours, theirs = socket.socketpair()
    reporter = Reporter(ours)
    with ours, theirs:
        for _ in range(10):
            reporter.send(TraceMessage(0, 0, 0, (), "x" * 60_000))
        reporter.drain(0.05)


@pytest.mark.parametrize(
    ("runtime", "on"), [("", False), ('{"trace":true}', True), ('{"trace":false}', 0)]
)
def test_the_run_says_whether_to_record(
    runtime: str, on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TFCLUSTER_RUNTIME", runtime)
    monkeypatch.setattr(tracer_module, "_asked", False)
    monkeypatch.setattr(tracer_module, "_current", None)
    found = tracer_module.tracer()
    assert (found is not None) == bool(on)
    assert tracer_module.tracer() is found


def test_a_forked_child_does_not_send_what_its_parent_has_recorded() -> None:
    heard = Heard()
    heard.tracer.add("steps", "step", 1.0, 2.0)
    tracer_module._current, before = heard.tracer, tracer_module._current
    try:
        pid = os.fork()
        if pid == 0:
            heard.tracer.flush()
            os._exit(len(heard.batches))
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        tracer_module._current = before
    assert len(heard.rows()) == 1
