"""Tests that only one active run can hold a given name."""

from __future__ import annotations

import re
import signal

import pytest

from tests.kit.cluster import Cluster, Running
from tests.kit.oracle import assert_nothing_left
from tests.kit.time_limits import allow_s

RIVALS = 20
SCRIPT = "echo up; until [ -e meeting ]; do sleep 0.02; done"


def rivals(cluster: Cluster, *options: str) -> list[Running]:
    return [cluster.bash(SCRIPT, *options) for _ in range(RIVALS)]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_of_many_launches_of_one_name_exactly_one_wins(cluster: Cluster) -> None:
    launches = rivals(cluster, "--name", "digits")
    losers: list[Running] = []
    while len(losers) < RIVALS - 1:
        losers += [
            each
            for each in launches
            if each not in losers and each.process.poll() is not None
        ]
    (winner,) = [each for each in launches if each not in losers]
    winner.up()
    told = re.compile(
        rf"error: the run {winner.run} already uses the name 'digits' "
        rf"since \d\d:\d\d:\d\d \(pid {winner.process.pid} on .+\)\n  hint: .+\n"
    )
    for loser in losers:
        assert loser.end() == 7
        assert told.fullmatch(loser.err), loser.err
    assert cluster.run_ids() == [winner.run]
    (cluster.folder / "meeting").touch()
    assert winner.end() == 0
    assert_nothing_left(winner)


def test_a_second_launch_is_refused_at_once(cluster: Cluster) -> None:
    first = cluster.bash(SCRIPT, "--name", "digits").up()
    code, seconds = cluster.bash(SCRIPT, "--name", "digits").end_timed()
    assert (code, seconds < allow_s(2)) == (7, True)
    other = cluster.bash("true", "--name", "other")
    assert other.end() == 0
    first.signal(signal.SIGTERM)
    assert first.end() == 143
    again = cluster.bash("true", "--name", "digits")
    assert again.end() == 0
    assert_nothing_left(again)


def test_a_killed_launcher_holds_no_name(cluster: Cluster) -> None:
    first = cluster.bash(SCRIPT, "--name", "digits").up()
    first.signal(signal.SIGKILL)
    first.end()
    again = cluster.bash("true", "--name", "digits")
    assert again.end() == 0, again.err
    assert_nothing_left(first, report=False)


def test_runs_without_a_given_name_do_not_conflict(cluster: Cluster) -> None:
    launches = [cluster.bash("exit 0") for _ in range(5)]
    assert [each.end() for each in launches] == [0] * 5
    assert len(cluster.run_ids()) == 5


def test_a_name_in_the_file_counts_as_given(cluster: Cluster) -> None:
    config = cluster.file(
        "name: digits\ntasks: {worker: 1}\nruntime: {strategy: none}\n"
        f"command: ['bash', '-c', '{SCRIPT}']\n"
    )
    first = cluster.start(config).up()
    assert cluster.start(config).end() == 7
    second = cluster.start(config, "--name", "other").up()
    (cluster.folder / "meeting").touch()
    assert [first.end(), second.end()] == [0, 0]
    assert_nothing_left(second)
