"""Tests that nothing is left behind by many tasks, nor by many killed ones."""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.agent.client import Agent, gone, marked
from tests.agent.test_stopping import LEFT_BEHIND
from tests.agent.test_warm_interpreters import fork, warm
from tests.kit.waiting import eventually
from tfcluster.agent import proc


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def zombies(agent: Agent) -> list[proc.ProcessEntry]:
    table = proc.snapshot().values()
    return [p for p in table if p.ppid == agent.pid and p.dead]


def cycle(agent: Agent, number: int) -> None:
    agent.start("w:0", "sh", "-c", "echo out; (sleep 0.01 &)", attempt=number)
    agent.start("w:1", "no such program", attempt=number)
    fork(agent, "w:2", "print(1)", attempt=number)
    agent.start("w:3", "sleep", "60", attempt=number)
    agent.stop("w:3")
    for task in ("w:0", "w:2", "w:3"):
        agent.wait("exited", task=task, attempt=number)


def test_fifty_cycles_leave_nothing(tmp_path: Path) -> None:
    with Agent(tmp_path) as agent:
        warm(agent)
        cycle(agent, 0)
        agent.start("probe", "sleep", "0.3")
        agent.wait("exited", task="probe")
        before = descriptors(agent.pid)
        for number in range(1, 51):
            cycle(agent, number)
        eventually(lambda: descriptors(agent.pid) <= before, "all is closed again")
        eventually(lambda: not zombies(agent), "all were waited for")
        assert agent.close() == 0


def both_gone(agent: Agent) -> bool:
    return gone(agent.pid) and gone(agent.process.pid)


@pytest.mark.chaos
def test_random_deaths_leave_nothing(tmp_path: Path) -> None:
    trials = int(os.environ.get("TFCLUSTER_CHAOS_TRIALS", "10"))
    seed = int(os.environ.get("TFCLUSTER_CHAOS_SEED", str(os.getpid())))
    print(f"seed {seed}")  # noqa: T201 - shown when it fails
    dice = random.Random(seed)
    stubborn = (
        f"{LEFT_BEHIND}\ndaemon(); daemon(out=subprocess.DEVNULL); time.sleep(60)"
    )
    for trial in range(trials):
        with Agent(tmp_path / str(trial), grace_s=0.2) as agent:
            for index in range(3):
                agent.python(f"w:{index}", stubborn)
            agent.read(dice.uniform(0, 0.3))
            victim = dice.choice(["agent", "guard", "hang up", "term"])
            if victim == "agent":
                os.kill(agent.pid, signal.SIGKILL)
            elif victim == "guard":
                agent.process.kill()
                agent.hang_up()
            elif victim == "term":
                agent.process.terminate()
            else:
                agent.hang_up()
            what = f"trial {trial}: the agent is gone after {victim}"
            eventually(partial(both_gone, agent), what)
            assert not marked(agent.run), f"trial {trial}: left after {victim}"
