"""Tests that kill tfcluster's own processes, alone and together: nothing survives."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import pytest

from tests.kit import machine
from tests.kit.cluster import Cluster, Running
from tests.kit.oracle import assert_nothing_left
from tests.kit.time_limits import allow_s
from tests.kit.waiting import eventually

# Prints the signals it receives, and goes on.
DEAF = """
import os, signal, time
def on_signal(number, frame):
    told = f'{signal.Signals(number).name} {time.monotonic()}\\n'
    os.write(1, told.encode())  # whole lines, whoever else writes
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, on_signal)
if os.fork():
    print('up', flush=True)
else:
    os.setsid()
while True:
    time.sleep(1)
"""
SLEEP = "trap 'exit 0' TERM; setsid sleep 600 & echo up; wait"


def kill(*victims: int) -> None:
    """Kill all at once: none of them may react to the death of another."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in victims:
            os.kill(pid, number)


def is_dead(pid: int) -> bool:
    return not machine.is_alive(pid)


def lost(running: Running) -> dict[str, object]:
    """Check that the run is lost because its launcher was killed; return its status."""
    assert running.end() == -signal.SIGKILL
    status = running.status()
    assert status["state"] == "lost"
    assert status["exit_code"] == 5
    assert status["reason"] == "the launcher died"
    assert {task["state"] for task in status["tasks"]} == {"lost"}
    return status


def test_agents_stop_everything_when_the_launcher_is_killed(cluster: Cluster) -> None:
    running = cluster.python(DEAF, "--set", "grace=1s", count=2).up(count=2)
    began = time.monotonic()
    running.signal(signal.SIGKILL)
    lost(running)
    assert_nothing_left(running, report=False)
    assert time.monotonic() - began < allow_s(12)
    for task in ("worker:0", "worker:1"):
        _, *told = [line.split() for line in running.text(task).splitlines()]
        said = [(name, float(at) - began) for name, at in told]
        # Parent and child each get one signal, without delay.
        assert [name for name, _ in said] == ["SIGTERM", "SIGTERM"]
        assert max(after for _, after in said) < allow_s(1)
    assert "lost" in cluster.command("status").stdout


def test_stop_sweeps_after_a_launcher_that_was_killed(cluster: Cluster) -> None:
    running = cluster.bash(SLEEP, count=2).up(count=2)
    guard, agent = machine.agent_of(running.process.pid)
    # The agent and guard die first: otherwise they would stop the tasks when the
    # launcher ends.
    kill(guard, agent, running.process.pid)
    lost(running)
    assert machine.carrying(f"TFCLUSTER_RUN={running.run}")
    done = cluster.command("stop", running.run)
    assert done.returncode == 0, done.stderr
    assert "leftover processes ended" in done.stderr
    assert not machine.carrying(f"TFCLUSTER_RUN={running.run}")
    assert_nothing_left(running, report=False)
    again = cluster.command("stop", running.run)
    assert "no leftover processes found" in again.stderr


def test_a_killed_agent_is_5_and_its_tasks_end(cluster: Cluster) -> None:
    running = cluster.python(DEAF, count=2).up(count=2)
    _, agent = machine.agent_of(running.process.pid)
    kill(agent)
    code, seconds = running.end_timed()
    assert code == 5
    assert seconds < allow_s(5)
    report = running.report()
    assert report["state"] == "failed"
    assert report["first_failure"]["task"] is None
    assert report["first_failure"]["host"] == "localhost"
    cause = report["first_failure"]["cause"]
    assert "contact lost" in cause
    assert "the agent was killed by SIGKILL" in cause
    assert cause in running.err
    assert {task["state"] for task in report["tasks"]} == {"lost"}
    assert_nothing_left(running)


def test_the_guard_alone_cleans_up(cluster: Cluster) -> None:
    running = cluster.python(DEAF, count=2).up(count=2)
    _, agent = machine.agent_of(running.process.pid)
    began = time.monotonic()
    kill(running.process.pid, agent)
    lost(running)
    assert_nothing_left(running, report=False)
    assert time.monotonic() - began < allow_s(12)


def test_a_run_goes_on_without_its_guard(cluster: Cluster) -> None:
    running = cluster.bash("echo up; until [ -e meeting ]; do sleep 0.02; done").up()
    guard, _ = machine.agent_of(running.process.pid)
    kill(guard)
    running.wait_for_err("the guard process died")
    (cluster.folder / "meeting").touch()
    assert running.end() == 0
    assert_nothing_left(running)


def test_agent_and_guard_killed_together_are_swept_after(cluster: Cluster) -> None:
    running = cluster.python(DEAF, count=2).up(count=2)
    guard, agent = machine.agent_of(running.process.pid)
    kill(guard, agent)
    code, seconds = running.end_timed()
    assert code == 5
    assert seconds < allow_s(10)
    swept = running.report()["swept"]
    assert swept == 4, f"{running.events()} {running.text('worker:0')}"
    assert_nothing_left(running)


def test_a_killed_sweeper_is_followed_by_another(cluster: Cluster) -> None:
    running = cluster.python(DEAF, count=2).up(count=2)
    agent = machine.agent_of(running.process.pid)
    kill(*agent)
    found: list[int] = []

    def sweeper() -> list[int]:
        guards = machine.children(running.process.pid)
        kin = [pid for pid in guards if pid not in agent]
        found[:] = [*kin, *(child for pid in kin for child in machine.children(pid))]
        return found

    eventually(sweeper, lambda: running.err, 40)
    kill(*found)
    assert running.end() == 5
    assert_nothing_left(running)


def test_a_run_is_not_over_before_it_was_swept(cluster: Cluster) -> None:
    def is_in_time() -> bool:
        """Kill the launcher while the task is being swept, unless that is over."""
        running = cluster.python(DEAF).up()
        first = machine.agent_of(running.process.pid)
        kill(*first)
        sweepers = stopped_sweepers(running, first)
        if sweepers:
            running.wait_for("state", state="stopping")
            kill(running.process.pid, *sweepers)
        left = machine.carrying(f"TFCLUSTER_RUN={running.run}")
        if left:
            lost(running)
            assert cluster.command("stop", running.run).returncode == 0
        else:
            running.end()
        assert_nothing_left(running, report=False)
        return bool(left)

    # A sweep may be over before it is found.
    assert any(is_in_time() for _ in range(5))


def stopped_sweepers(running: Running, first: Sequence[int]) -> list[int]:
    """The guard of the next agent and that agent, stopped; none if they are gone."""
    pid = running.process.pid
    guards: list[int] = []

    def appear() -> bool:
        guards[:] = [child for child in machine.children(pid) if child not in first]
        return bool(guards) or running.process.poll() is not None

    eventually(appear, lambda: running.err, 40)
    with suppress(ProcessLookupError):
        for guard in guards:
            os.kill(guard, signal.SIGSTOP)
        # A guard that is stopped begins no other process.
        agents = [child for guard in guards for child in machine.children(guard)]
        for agent in agents:
            os.kill(agent, signal.SIGSTOP)
        return [*guards, *agents]
    return []


@pytest.mark.parametrize(
    "victims", [(0,), (1,), (0, 1)], ids=["guard", "agent", "both"]
)
def test_an_agent_killed_before_the_tasks_start(
    cluster: Cluster, victims: Sequence[int]
) -> None:
    running = cluster.bash(SLEEP)
    found = machine.agent_of(running.process.pid)
    kill(*(found[victim] for victim in victims))
    if victims == (0,):
        running.up()
        running.signal(signal.SIGTERM)
        assert running.end() == 143
    else:
        assert running.end() in (4, 5)
        assert running.report()["state"] == "failed"
    assert_nothing_left(running)


@pytest.mark.slow
def test_a_launcher_that_was_stopped_for_a_while_loses_nothing(
    cluster: Cluster,
) -> None:
    script = "for i in {1..60}; do echo line $i; sleep 0.1; done"
    running = cluster.bash(script)
    running.wait_for_text("line 1", "worker:0")
    running.signal(signal.SIGSTOP)
    running.wait_for_text("line 55", "worker:0")
    running.signal(signal.SIGCONT)
    assert running.end() == 0
    lines = [f"line {number}" for number in range(1, 61)]
    assert running.text("worker:0").splitlines() == lines
    assert running.out.splitlines() == [f"worker:0 | {line}" for line in lines]
    assert not running.found("host", state="lost")
    assert_nothing_left(running)


TRAIN = """
import tensorflow as tf
print('up', flush=True)
import time
while True:
    time.sleep(1)
"""


@pytest.mark.slow
@pytest.mark.tensorflow
def test_tasks_outlive_their_warm_interpreter(cluster: Cluster) -> None:
    program = cluster.folder / "train.py"
    program.write_text(TRAIN)
    running = cluster.start(
        *("-n", "2", "--set", "runtime.strategy=none", "--set", "restart.max=1"),
        *("--", "python", str(program)),
    )
    running.wait_for_text("up", "worker:0", "worker:1", timeout_s=50)
    pids = [
        running.wait_for("task", task=f"worker:{index}", state="running")["pid"]
        for index in (0, 1)
    ]
    _, agent = machine.agent_of(running.process.pid)
    (warm,) = [p for p in machine.children(agent) if p not in pids]
    kill(warm)
    eventually(lambda: not machine.is_alive(warm), lambda: "alive", 40)
    assert all(map(machine.is_alive, pids))
    # A restarted task starts cold.
    kill(pids[0])
    running.wait_for("task", task="worker:0", attempt=1, state="running", timeout_s=30)
    running.signal(signal.SIGTERM)
    assert running.end() == 143
    assert_nothing_left(running)


def test_deaths_while_the_agent_did_not_run_are_distinguished(cluster: Cluster) -> None:
    """The agent is stopped meanwhile and sees all the deaths at once."""
    script = (
        "echo up; until [ -e go-$TFCLUSTER_TASK ]; do sleep 0.02; done; "
        "exit $((${TFCLUSTER_TASK#worker:} + 5))"
    )
    running = cluster.bash(script, count=4).up(count=4)
    pids = {
        index: running.wait_for("task", task=f"worker:{index}", state="running")["pid"]
        for index in range(4)
    }
    _, agent = machine.agent_of(running.process.pid)
    os.kill(agent, signal.SIGSTOP)
    for index in (2, 0, 3, 1):
        (cluster.folder / f"go-worker:{index}").touch()
        dead = partial(is_dead, pids[index])
        eventually(dead, lambda: running.err, 40)
    os.kill(agent, signal.SIGCONT)
    assert running.end() == 1
    first = running.report()["first_failure"]
    assert (first["task"], first["exit_code"]) == ("worker:2", 7)
    failures = [event["task"] for event in running.found("failure")]
    assert failures == ["worker:2", "worker:0", "worker:3", "worker:1"]
    assert_nothing_left(running)
