"""Tests that nothing of a run is left, whatever is killed and whenever."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Mapping

import pytest

from tests.launch import machine
from tests.launch.chaos import PROGRAM, seeds, strikes
from tests.launch.cluster import Cluster, Running
from tests.launch.oracle import assert_nothing_left

TRIALS = 8
LONGEST_S = 3.0


@pytest.mark.chaos
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seed", seeds(TRIALS))
def test_nothing_survives(cluster: Cluster, seed: int) -> None:
    rng = random.Random(seed)
    restarts = ("--set", f"restart.max={rng.choice([0, 0, 1])}")
    running = cluster.python(PROGRAM, "--set", "grace=1s", *restarts, count=2)

    def pick() -> tuple[str, list[int]]:
        name = rng.choice(list(VICTIMS))
        return name, VICTIMS[name](running)

    hit = list(strikes(rng, LONGEST_S, pick))
    killed = {name for each in hit if each.pids for name in each.what.split(", ")}
    code = running.end(30)
    told = f"seed {seed}: {', '.join(map(str, hit))}; exit code {code}; {running.err}"
    assert code in (0, 1, 4, 5, -signal.SIGKILL), told
    if not cluster.run_ids():
        return  # killed before there was a run
    running.adopt(cluster.run_ids()[0])
    try:
        if killed >= {"launcher", "guard", "agent"}:
            # No process is left that could clean up, so the user has to run `stop`.
            assert cluster.command("stop", running.run).returncode == 0
        assert_nothing_left(running, report=code >= 0)
    except AssertionError as error:
        raise AssertionError(told) from error


def launcher(running: Running) -> list[int]:
    return [running.process.pid] if running.process.poll() is None else []


def guard(running: Running) -> list[int]:
    return [
        pid
        for above in launcher(running)
        for pid in machine.children(above)
        if machine.title(pid) == "tfcluster: guard"
    ]


def agent(running: Running) -> list[int]:
    return [pid for above in guard(running) for pid in machine.children(above)][:1]


def task(running: Running) -> list[int]:
    return [pid for above in agent(running) for pid in machine.children(above)][:1]


def child(running: Running) -> list[int]:
    return [pid for above in task(running) for pid in machine.children(above)][:1]


VICTIMS: Mapping[str, Callable[[Running], list[int]]] = {
    "launcher": launcher,
    "guard": guard,
    "agent": agent,
    "guard, agent": lambda r: guard(r) + agent(r),
    "launcher, guard, agent": lambda r: launcher(r) + guard(r) + agent(r),
    "task": task,
    "child": child,
}
