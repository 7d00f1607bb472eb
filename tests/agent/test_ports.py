"""Tests of ports that are held, and of who listens on them."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.agent.client import PYTHON, Agent
from tests.kit.waiting import eventually

LISTEN = """
import os, socket, sys, time
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
s.bind(("0.0.0.0", int(sys.argv[1]))); s.listen(); print("up", flush=True)
time.sleep(600)
"""

# Binds all ports of a range again and again, as a plain program binds them.
THIEF = """
import collections, itertools, socket, sys
low, high = int(sys.argv[1]), int(sys.argv[2])
print("up", flush=True)
taken = collections.deque()
for port in itertools.cycle(range(low, high + 1)):
    s = socket.socket()
    try:
        s.bind(("", port)); taken.append(s)
    except OSError:
        s.close()
    # It may be put to sleep at any time, and enough ports must be left then.
    if len(taken) > 500:
        taken.popleft().close()
"""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with Agent(tmp_path) as started:
        yield started


def hold(
    agent: Agent, count: int, low: int | None = None, high: int | None = None
) -> list[int]:
    agent.send(type="hold", count=count, low=low, high=high)
    ports: list[int] = agent.wait("held")["ports"]
    return ports


def bind(port: int, *, family: int = socket.AF_INET, share: bool) -> bool:
    with socket.socket(family) as other:
        if share:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            other.bind(("", port))
            other.listen()
        except OSError:
            return False
        return True


def test_only_who_asks_to_share_gets_a_held_port(agent: Agent) -> None:
    [port] = hold(agent, 1)
    assert not bind(port, share=False)
    assert bind(port, share=True)
    if socket.has_ipv6:
        assert not bind(port, family=socket.AF_INET6, share=False)
        assert bind(port, family=socket.AF_INET6, share=True)
    assert agent.close() == 0
    assert bind(port, share=False)


def test_another_user_never_gets_a_held_port(agent: Agent) -> None:
    [port] = hold(agent, 1)
    code = (
        "import os,socket,sys\nos.setuid(65534)\ns=socket.socket()\n"
        "s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n"
        "s.bind(('', int(sys.argv[1])))"
    )
    if not agent.hello["root"]:
        pytest.skip("only root can become another user")
    done = subprocess.run(
        [sys.executable, "-c", code, str(port)], capture_output=True, check=False
    )
    assert b"Address already in use" in done.stderr


def test_default_ports_are_none_that_connections_take(agent: Agent) -> None:
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text()
    low, high = map(int, text.split())
    ports = hold(agent, 20)
    assert len(set(ports)) == 20
    assert all(port >= 20000 and not low <= port <= high for port in ports)


def test_a_range_that_is_too_small_says_so(agent: Agent) -> None:
    [port] = hold(agent, 1)
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        taken = other.getsockname()[1]
        agent.send(type="hold", count=1, low=taken, high=taken)
        held = agent.wait("held")
        assert held["ports"] == []
        assert (
            held["cause"] == f"only 0 of 1 ports between {taken} and {taken} are free"
        )
    assert hold(agent, 1, taken, taken) == [taken]
    agent.send(type="hold", count=1, low=port, high=port)
    assert agent.wait("held")["ports"] == []


def test_a_thief_and_two_agents_never_collide(tmp_path: Path) -> None:
    low, high = 24000, 26999
    thief = subprocess.Popen(
        [PYTHON, "-c", THIEF, str(low), str(high)], stdout=subprocess.PIPE
    )
    try:
        assert thief.stdout is not None
        thief.stdout.readline()
        with Agent(tmp_path / "a") as first, Agent(tmp_path / "b") as second:
            held: list[int] = []
            for _ in range(20):
                for agent in (first, second):
                    agent.send(type="hold", count=25, low=low, high=high)
                for agent in (first, second):
                    held += agent.wait("held")["ports"]
            assert len(held) == len(set(held))
            assert len(held) == 1000
            assert not any(bind(port, share=False) for port in held)
    finally:
        thief.kill()
        thief.wait()
        if thief.stdout is not None:
            thief.stdout.close()


def test_the_tasks_own_listener_is_proven(agent: Agent) -> None:
    [port] = hold(agent, 1)
    agent.start("ps:0", PYTHON, "-c", LISTEN, str(port), port=port, listens=True)
    listening = agent.wait("listening", timeout_s=20)
    assert listening == {
        "type": "listening",
        "task": "ps:0",
        "attempt": 0,
        "port": port,
    }


def test_a_listener_of_its_child_is_the_tasks_own(agent: Agent) -> None:
    [port] = hold(agent, 1)
    argv = [PYTHON, "-c", LISTEN, str(port)]
    run = f"import subprocess; subprocess.run({argv!r})"
    agent.start("ps:0", PYTHON, "-c", run, port=port, listens=True)
    agent.wait("listening", timeout_s=20)


def test_an_intruder_is_named(agent: Agent) -> None:
    [port] = hold(agent, 1)
    with squatting(port) as squatter:
        agent.start("ps:0", PYTHON, "-c", LISTEN, str(port), port=port, listens=True)
        intruder = agent.wait("intruder", task="ps:0", timeout_s=20)
        assert intruder["pid"] == squatter.pid
        assert intruder["port"] == port
        assert not [f for f in agent.frames if f["type"] == "listening"]
    agent.wait("listening", timeout_s=20)


STAYS = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("told", flush=True))
print("ready", flush=True)
while True:
    time.sleep(60)
"""


def test_who_was_told_to_end_has_no_intruder(agent: Agent) -> None:
    """A server that ends may have let go of its port before it is gone."""
    ports = hold(agent, 2)
    for index, port in enumerate(ports):
        agent.start(f"ps:{index}", PYTHON, "-c", STAYS, port=port, listens=True)
    eventually(lambda: agent.output("ps:0") and agent.output("ps:1"), "both run")
    agent.stop("ps:0", grace_s=60)
    eventually(lambda: "told" in agent.output("ps:0"), "it was told")
    with squatting(ports[0]), squatting(ports[1]):
        # In the same passes, the agent looks at the ports of both.
        agent.wait("intruder", task="ps:1", timeout_s=20)
        assert not [
            f
            for f in agent.frames
            if (f["type"], f.get("task")) == ("intruder", "ps:0")
        ]
    agent.stop("ps:0", "ps:1", grace_s=0)


@contextmanager
def squatting(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run another program of the same user that shares the port and listens on it."""
    squatter = subprocess.Popen(
        [PYTHON, "-c", LISTEN, str(port)], stdout=subprocess.PIPE
    )
    assert squatter.stdout is not None
    with squatter.stdout:
        squatter.stdout.readline()
        try:
            yield squatter
        finally:
            squatter.kill()
            squatter.wait()


# Listens as soon as a file exists.
LATER = f"""
import pathlib, sys, time
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.02)
{LISTEN}"""


def test_a_listener_beside_a_script_s_own_is_an_intruder(
    agent: Agent, tmp_path: Path
) -> None:
    """Without the script's own, it is only a warning: it may be the script's daemon."""
    [port] = hold(agent, 1)
    go = tmp_path / "go"
    with squatting(port) as squatter:
        argv = (PYTHON, "-c", LATER, str(port), str(go))
        agent.start("w:0", *argv, port=port, watched=True)
        text = agent.wait("note", timeout_s=20)["text"]
        assert text == (
            f"warning: pid {squatter.pid}, which w:0 did not start, listens on port "
            f"{port} of that task"
        )
        assert not [f for f in agent.frames if f["type"] == "intruder"]
        go.touch()
        intruder = agent.wait("intruder", task="w:0", timeout_s=20)
        assert (intruder["pid"], intruder["port"]) == (squatter.pid, port)


def test_a_script_s_server_may_go_into_the_background(agent: Agent) -> None:
    [port] = hold(agent, 1)
    code = (
        "import os, time\n"
        "if os.fork(): time.sleep(600)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
    )
    argv = (PYTHON, "-c", code + LISTEN, str(port))
    agent.start("w:0", *argv, port=port, watched=True)
    agent.wait("listening", timeout_s=20)
    frames = [f["type"] for f in agent.frames]
    assert "intruder" not in frames
    assert "note" not in frames


def test_a_task_on_the_port_of_another_is_an_intruder(agent: Agent) -> None:
    ports = hold(agent, 2)
    argv = (PYTHON, "-c", LISTEN, str(ports[0]))
    agent.start("w:1", *argv, port=ports[1], watched=True)
    other = agent.wait("started", task="w:1")["pid"]
    # The agent stops looking at a port once its task is the only listener there.
    eventually(lambda: "up" in agent.output("w:1"), "w:1 listens")
    agent.start("w:0", *argv, port=ports[0], watched=True)
    assert agent.wait("intruder", task="w:0", timeout_s=20)["pid"] == other


def test_who_does_not_listen_is_not_said_to(agent: Agent) -> None:
    [port] = hold(agent, 1)
    agent.start("w:0", PYTHON, "-c", LISTEN, str(port), port=port, listens=False)
    agent.start("w:1", "sleep", "0.5", port=port + 1, listens=True)
    agent.wait("exited", task="w:1")
    assert not [f for f in agent.frames if f["type"] == "listening"]


@pytest.mark.tensorflow
def test_a_tensorflow_server_starts_on_a_held_port(agent: Agent) -> None:
    [port] = hold(agent, 1)
    code = (
        "import tensorflow as tf, time\n"
        f"s=tf.distribute.Server({{'ps':['127.0.0.1:{port}']}},job_name='ps')\n"
        "print('target', s.target, flush=True); time.sleep(600)\n"
    )
    env = {"TF_GRPC_REUSE_PORT": "true", "TF_CPP_MIN_LOG_LEVEL": "2"}
    agent.start("ps:0", PYTHON, "-c", code, env=env, port=port, listens=True)
    assert agent.wait("listening", timeout_s=50)["port"] == port
    socket.create_connection(("127.0.0.1", port), 5).close()
