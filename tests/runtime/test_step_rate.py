"""Steps are counted once per batch, and their rate is reported."""

from __future__ import annotations

import json
import socket

from tests.kit.ranks import TOKEN
from tfcluster.runtime.collective import Group, Signature
from tfcluster.runtime.collective.transports.hierarchical import HostTransport
from tfcluster.runtime.net.rendezvous import Member
from tfcluster.runtime.telemetry.agent_channel import Reporter
from tfcluster.runtime.telemetry.step_rate import ExchangeTotals, StepRate


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_optimizer_with_most_gradients_is_counted() -> None:
    ours, theirs = socket.socketpair()
    clock = Clock()
    reporter = Reporter(ours, clock)
    group = Group(HostTransport(Member(0, 1, TOKEN), ["127.0.0.1:1"]))
    step_rate = StepRate(reporter, group, clock)
    for _ in range(6):
        clock.now += 0.5
        step_rate.applied("generator")
        step_rate.applied("critic")
        step_rate.applied("critic")
    reporter.flush()
    assert step_rate.steps == 12
    with ours, theirs:
        ours.shutdown(socket.SHUT_WR)
        events = [json.loads(line) for line in theirs.makefile()]
    assert [event["step"] for event in events] == [1, 5, 9, 12]
    assert [event["steps_per_s"] for event in events] == [None, 4.0, 4.0, 4.0]
    assert {event["wait_share"] for event in events[1:]} == {0.0}


def test_exchanges_are_added_up_by_purpose() -> None:
    totals = ExchangeTotals()
    totals.add("gradients", 2.0, 100)
    totals.add("metrics", 5.0, 10)
    totals.add("gradients", 2.0, 100)
    for number in range(200):
        totals.add(f"weights {number}", 0.5, 1)
    (metrics, most), (gradients, second) = totals.longest(3)[1:]
    assert totals.longest(3)[0][0] == "others"
    assert (metrics, most.count, most.seconds, most.bytes) == ("metrics", 1, 5.0, 10)
    assert (gradients, second.count, second.bytes) == ("gradients", 2, 200)
    assert len(totals.longest(1000)) == 65


def test_a_group_counts_its_exchanges() -> None:
    group = Group(HostTransport(Member(0, 1, TOKEN), ["127.0.0.1:1"]))
    for _ in range(3):
        with group.exchange(Signature("what")) as call:
            call.transport.allgather(b"12345")
    ((what, total),) = group.totals.longest(5)
    assert (what, total.count) == ("what", 3)
    assert total.bytes == group.exchanged_bytes >= 15
    assert total.seconds > 0


def test_the_rate_of_a_short_run_excludes_the_first_step() -> None:
    ours, theirs = socket.socketpair()
    clock = Clock()
    reporter = Reporter(ours, clock)
    group = Group(HostTransport(Member(0, 1, TOKEN), ["127.0.0.1:1"]))
    step_rate = StepRate(reporter, group, clock)
    clock.now += 6.0
    for _ in range(24):
        step_rate.applied("sgd")
        clock.now += 0.025
    reporter.flush()
    with ours, theirs:
        ours.shutdown(socket.SHUT_WR)
        *_, last = [json.loads(line) for line in theirs.makefile()]
    assert (last["step"], last["steps_per_s"]) == (24, 40.0)


def test_models_that_are_trained_one_after_another_continue_the_count() -> None:
    """And the time in which the second one is compiled is not counted."""
    ours, theirs = socket.socketpair()
    clock = Clock()
    reporter = Reporter(ours, clock)
    group = Group(HostTransport(Member(0, 1, TOKEN), ["127.0.0.1:1"]))
    step_rate = StepRate(reporter, group, clock)
    for optimizer in ("one", "other"):
        clock.now += 60.0
        for _ in range(4):
            step_rate.applied(optimizer)
            clock.now += 2.0
    with ours, theirs:
        ours.shutdown(socket.SHUT_WR)
        events = [json.loads(line) for line in theirs.makefile()]
    assert [event["step"] for event in events] == [1, 2, 3, 4, 5, 6, 7]
    assert [event["steps_per_s"] for event in events] == [None, *[0.5] * 6]
