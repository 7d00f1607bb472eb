"""Kept interpreters: what launches take, what they refuse, and who survives whom."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from tests.launch import machine
from tests.launch.cluster import Cluster
from tests.launch.kept import Keeper, assert_only_kept_is_left, marks, processes_of
from tests.launch.test_deaths import is_dead, kill

TOOK = "localhost: took a kept interpreter with TensorFlow 2.21.0, Keras 3.15.0 (pid "


@pytest.fixture
def keeper(cluster: Cluster) -> Iterator[Keeper]:
    keeper = Keeper(cluster)
    yield keeper
    keeper.stop()


def test_a_launch_takes_it_and_says_so(keeper: Keeper) -> None:
    kept = keeper.keep()
    running = keeper.launch()
    assert f"{TOOK}{kept})" in running.err
    assert [e for e in running.found("note") if e["text"] == f"{TOOK}{kept})"]
    assert running.text("worker:0") == "up 1 True\n"
    found = processes_of(running, kept)
    tasks = [
        running.wait_for("task", state="running", task=f"worker:{n}")["pid"]
        for n in (0, 1)
    ]
    assert {machine.parent(pid) for pid in tasks} == {found["agent"]}
    agent_mark = f"TFCLUSTER_RUN={running.run}".encode()
    for pid in (*tasks, found["server"]):
        assert agent_mark in machine.environ(pid)
        assert marks(pid) == {
            b"TFCLUSTER_RUN",
            b"TFCLUSTER_AGENT",
            b"TFCLUSTER_STATE_DIR",
        }
    assert marks(kept) == {b"TFCLUSTER_KEPT", b"TFCLUSTER_STATE_DIR"}
    assert keeper.finish(running) == 0
    assert_only_kept_is_left(running, kept)
    (listed,) = keeper.listed()
    assert (listed["pid"], listed["uses"]) == (kept, 1)


PARTS = ("kept", "server", "first guard", "guard", "first agent", "agent")
DECISIVE = {"first agent", "agent"}
"""A run ends with either of these; all others can be missed."""
USUAL = [
    ("kept",),
    ("server", "guard"),
    ("agent",),
    ("first agent", "kept"),
    ("agent", "guard", "first agent", "first guard"),
]
OTHERS = [
    chosen
    for count in range(1, len(PARTS) + 1)
    for chosen in itertools.combinations(PARTS, count)
    if set(chosen) not in map(set, USUAL)
]


@pytest.mark.parametrize(
    "victims",
    [
        *USUAL,
        *(pytest.param(chosen, marks=pytest.mark.slow) for chosen in OTHERS),
    ],
    ids=", ".join,
)
def test_whoever_is_killed_nothing_is_left_of_the_run(
    keeper: Keeper, victims: Sequence[str]
) -> None:
    kept = keeper.keep()
    running = keeper.launch()
    found = processes_of(running, kept)
    kill(*(found[victim] for victim in victims))
    spared = None if "kept" in victims else kept
    if DECISIVE & set(victims):
        assert running.end() == 5, running.err
        assert running.report()["state"] == "failed"
    else:
        for victim in victims:
            machine.eventually(partial(is_dead, found[victim]), lambda: "alive", 10)
        assert running.process.poll() is None
        if {"guard", "first guard"} & set(victims):
            running.wait_for_err("the guard process died")
        assert keeper.finish(running) == 0, running.err
    assert_only_kept_is_left(running, spared)


@pytest.mark.parametrize(
    "victims",
    [(), ("kept",), ("guard", "first guard"), ("agent", "first agent")],
    ids=lambda victims: ", ".join(victims) or "none",
)
def test_nothing_is_left_when_the_launcher_is_killed(
    keeper: Keeper, victims: Sequence[str]
) -> None:
    kept = keeper.keep()
    running = keeper.launch()
    found = processes_of(running, kept)
    kill(found["launcher"], *(found[victim] for victim in victims))
    assert running.end() == -signal.SIGKILL
    assert_only_kept_is_left(running, None if "kept" in victims else kept)


def test_stop_sweeps_what_was_forked_from_a_kept_interpreter(keeper: Keeper) -> None:
    kept = keeper.keep()
    running = keeper.launch()
    found = processes_of(running, kept)
    kill(*(pid for part, pid in found.items() if part not in ("kept", "server")))
    assert running.end() == -signal.SIGKILL
    assert machine.carrying(f"TFCLUSTER_RUN={running.run}")
    done = keeper.cluster.command("stop", running.run)
    assert done.returncode == 0, done.stderr
    assert_only_kept_is_left(running, kept)


def test_two_runs_share_it_and_end_apart(keeper: Keeper) -> None:
    kept = keeper.keep()
    first, second = keeper.launch(), keeper.launch()
    assert f"{TOOK}{kept})" in second.err
    first.signal(signal.SIGTERM)
    assert first.end() == 143
    assert second.process.poll() is None
    assert keeper.cluster.command("clean", "--older-than", "0s").returncode == 0
    assert keeper.cluster.command("stop", second.run).returncode == 0
    assert second.end() == 143
    assert_only_kept_is_left(second, kept)


def test_it_is_ended_while_its_tasks_run(keeper: Keeper) -> None:
    kept = keeper.keep()
    running = keeper.launch()
    keeper.stop()
    machine.eventually(partial(is_dead, kept), lambda: "alive", 10)
    assert keeper.listed() == []
    assert keeper.finish(running) == 0
    assert_only_kept_is_left(running, None)


def test_a_restarted_task_is_forked_again(keeper: Keeper) -> None:
    kept = keeper.keep()
    running = keeper.launch("--set", "restart.max=1", "--set", "restart.scope=task")
    pid = running.wait_for("task", state="running", task="worker:0")["pid"]
    os.kill(pid, signal.SIGKILL)
    again = running.wait_for("task", state="running", task="worker:0", attempt=1)
    assert machine.parent(again["pid"]) == processes_of(running, kept)["agent"]
    assert keeper.finish(running) == 0
    assert_only_kept_is_left(running, kept)
