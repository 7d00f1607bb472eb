"""Messages about ranks that are late or have left, and which rank is at fault."""

from __future__ import annotations

from functools import partial

import pytest

from tfcluster.protocol.frames import encode
from tfcluster.protocol.wire import parse
from tfcluster.runtime.collective.peer_reports import (
    Exit,
    ExitReport,
    Query,
    RankProgress,
    ReadyMessage,
    SignalMessage,
    cannot_succeed,
    decode,
    is_reporter,
    possible_causes,
    stalled_text,
    verdict,
)

MINE = RankProgress(17, "gradients of adam", 60.2, inside=True)
CAME = RankProgress(17, "gradients of adam", 59.0, inside=True)
AWAY = RankProgress(16, "gradients of adam", 61.3, inside=False)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (
            {1: CAME, 2: AWAY},
            "rank 2 has not entered exchange 17: gradients of adam (waiting for 60 s); "
            "its last exchange was 16: gradients of adam, 61 s ago",
        ),
        (
            {1: None, 2: RankProgress(0, "", 99.0, inside=False)},
            "rank 1 has not entered exchange 17: gradients of adam (waiting for 60 s); "
            "it does not answer (stopped, or stuck outside Python?); rank 2 has not "
            "entered it either; it has not exchanged anything yet",
        ),
        (
            {1: RankProgress(16, "metrics", 70.0, inside=True), 2: CAME},
            "rank 1 has not entered exchange 17: gradients of adam (waiting for 60 s); "
            "it has been in exchange 16: metrics for 70 s",
        ),
        (
            {1: CAME, 2: CAME},
            "exchange 17: gradients of adam has taken 60 s; all ranks are in it",
        ),
    ],
)
def test_what_is_said_of_those_who_are_late(
    others: dict[int, RankProgress | None], expected: str
) -> None:
    assert stalled_text(MINE, others) == expected


def test_possible_causes_of_a_hang_at_the_start() -> None:
    one_host, two = ["127.0.0.1", "127.0.0.1"], ["10.0.0.1", "10.0.0.2"]
    proxy = {"http_proxy": "http://proxy:3128"}
    causes = partial(possible_causes, connected=True)
    assert "proxy" not in causes({}, two)
    assert "a firewall between the hosts" in causes({}, two)
    assert "firewall" not in causes(proxy, one_host)
    expected = "http_proxy is set, and no_proxy does not list 10.0.0.2;"
    assert expected in causes({**proxy, "no_proxy": ".a, 10.0.0.1"}, two)
    exempt = {**proxy, "no_proxy": "10.0.0.1,10.0.0.2"}
    assert "http_proxy" not in causes(exempt, two)
    assert "proxy" not in possible_causes(proxy, two, connected=False)


def test_the_lowest_waiting_rank_reports() -> None:
    assert is_reporter(0, 17, {1: CAME, 2: AWAY})
    assert not is_reporter(1, 17, {0: CAME, 2: AWAY})
    assert is_reporter(1, 17, {0: None, 2: CAME})
    assert is_reporter(2, 17, {0: AWAY, 1: None})


def test_messages_survive_the_wire() -> None:
    for message in (Query(MINE), Exit(LATE), ReadyMessage(), SignalMessage(15, 2)):
        assert decode(parse(encode(message))) == message


LOST = ExitReport(5, "PeerLostError", "rank 2 has left: its process ended")
LATE = ExitReport(5, "CollectiveTimeoutError", "rank 2 has sent nothing for 9 s")
ENDED = ExitReport(4, text="ValueError: boom")


@pytest.mark.parametrize(
    ("died", "reports", "expected"),
    [
        ([2], {3: LOST}, "PeerLostError: rank 2 has left: its process ended or"),
        ([], {3: LOST}, "PeerLostError: rank 2 has left: its process ended"),
        ([], {3: LATE}, "CollectiveTimeoutError: rank 2 has sent nothing for 9 s"),
        ([], {2: ENDED}, "PeerLostError: rank 2 has left after exchange 4: its "),
        ([], {2: ExitReport(5)}, "None: None"),
        ([], {}, "None: None"),
        (
            [],
            {1: ExitReport(4, "CollectiveTimeoutError", "late")},
            "PeerLostError: rank 1 has left: late",
        ),
        (
            [],
            {1: ExitReport(5, "NotDistributedError", "nothing")},
            "PeerLostError: rank 1 has left: nothing",
        ),
    ],
)
def test_who_is_to_blame(
    died: list[int], reports: dict[int, ExitReport], expected: str
) -> None:
    found = verdict(5, died, reports)
    said = f"{type(found).__name__ if found else None}: {found}"
    assert said.startswith(expected)


@pytest.mark.parametrize(
    ("report", "expected"),
    [(ExitReport(5), False), (ENDED, True), (LOST, True), (ExitReport(6), False)],
)
def test_an_exchange_that_somebody_will_not_come_to(
    report: ExitReport, expected: bool
) -> None:
    assert cannot_succeed(5, {1: ExitReport(5), 2: report}) is expected
