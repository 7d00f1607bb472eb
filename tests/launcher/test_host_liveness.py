"""Tests of the detection of silent hosts, with simulated time."""

from __future__ import annotations

from queue import SimpleQueue

import pytest

from tfcluster.launcher.agent_connection import Answered
from tfcluster.launcher.host_liveness import ANSWERING_S, SILENCE_S, HostLiveness
from tfcluster.plan.model import Host
from tfcluster.schedulers.starting import AgentChannel

HOST = Host(name="h1", address="h1")


class Way:
    """A starter that knows whether the host answers a new connection."""

    def __init__(self, answers: bool) -> None:
        self._answers = answers

    def start_agent(self, host: Host) -> AgentChannel:
        raise AssertionError(f"nobody is to be sent to {host.name}")

    def answers(self, host: Host) -> bool:
        return self._answers


def lost_after(silence: HostLiveness, posted: SimpleQueue[Answered]) -> float:
    """Return how long ``HOST`` may be silent from now on, in simulated time."""
    silence.heard(HOST.name)
    asked = False
    for tenth in range(1, 1000):
        limit_s = silence.elapsed(HOST, 0.1)
        if limit_s is not None:
            assert tenth / 10 == pytest.approx(limit_s, abs=0.2)
            return limit_s
        if tenth / 10 > SILENCE_S - 1 and not asked:
            asked = True
            silence.answered(posted.get(timeout=10))
    raise AssertionError("it is never lost")


@pytest.mark.parametrize(
    ("answers", "limit_s"), [(True, ANSWERING_S), (False, SILENCE_S)]
)
def test_who_answers_somebody_new_is_given_more_time(
    answers: bool, limit_s: float
) -> None:
    posted: SimpleQueue[Answered] = SimpleQueue()
    silence = HostLiveness(Way(answers), posted.put)
    assert lost_after(silence, posted) == limit_s
    # A sign of life resets everything.
    assert lost_after(silence, posted) == limit_s


def test_an_answer_of_before_counts_for_nothing() -> None:
    posted: SimpleQueue[Answered] = SimpleQueue()
    silence = HostLiveness(Way(True), posted.put)
    silence.heard(HOST.name)
    assert silence.elapsed(HOST, SILENCE_S - 1) is None
    late = posted.get(timeout=10)
    silence.heard(HOST.name)
    silence.answered(late)
    assert silence.elapsed(HOST, SILENCE_S + 0.1) == SILENCE_S


def test_what_came_some_time_ago_gives_no_more_than_the_rest_of_the_time() -> None:
    silence = HostLiveness(Way(False), SimpleQueue[Answered]().put)
    silence.heard(HOST.name)
    assert silence.elapsed(HOST, SILENCE_S + 0.1) == SILENCE_S
    silence.heard(HOST.name, SILENCE_S - 0.2)
    assert silence.elapsed(HOST, 0.1) is None
    assert silence.elapsed(HOST, 0.2) == SILENCE_S
