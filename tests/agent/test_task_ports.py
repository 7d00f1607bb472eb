"""The agent filters the port of a program that may start a server of its own."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.client import PYTHON, Agent
from tests.agent.test_ports import hold
from tests.kit.waiting import eventually

ANSWER_S = 20.0

# A child sends a byte to each client, and keeps the connection. Once a file exists, the
# parent closes the listener, opens another one, and does the same there.
ANSWER = """
import os, pathlib, socket, sys, time
def listen():
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    s.bind(("", int(sys.argv[1]))); s.listen()
    return s
s = listen()
kept = []
if os.fork() == 0:
    s.settimeout(0.05)
    while True:
        try:
            kept.append(s.accept()[0])
            kept[-1].send(b"x")
        except TimeoutError:
            pass
        if pathlib.Path(sys.argv[2]).exists():
            break
    os._exit(0)
os.wait()
s.close()
s = listen()
print("again", flush=True)
while True:
    kept.append(s.accept()[0])
    kept[-1].send(b"x")
"""
PEERS = "127.0.0.2/32"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Agent]:
    with Agent(tmp_path) as started:
        yield started


def connects(port: int, source: str) -> bool:
    """Whether the task, and not the guard, answers a client."""
    with socket.socket() as client:
        client.settimeout(ANSWER_S)
        client.bind((source, 0))
        try:
            client.connect(("127.0.0.1", port))
            return client.recv(1) == b"x"
        except OSError:
            return False


def rejected(port: int) -> bool:
    """Whether somebody listens there, and hangs up on 127.0.0.1."""
    with socket.socket() as client:
        client.settimeout(ANSWER_S)
        try:
            client.connect(("127.0.0.1", port))
            return client.recv(1) == b""
        except OSError:
            return False


def start(agent: Agent, peers: str | None, **keys: object) -> int:
    [port] = hold(agent, 1)
    again = str(agent.folder / "again")
    argv = (PYTHON, "-c", ANSWER, str(port), again)
    keys = {"port": port, "watched": True, "peers": peers, **keys}
    agent.start("worker:0", *argv, **keys)
    return port


def test_strangers_are_kept_out_of_a_program_s_server(agent: Agent) -> None:
    port = start(agent, PEERS)
    agent.wait("listening", timeout_s=20)
    eventually(lambda: rejected(port), "the guard")
    assert connects(port, "127.0.0.2")
    assert not [f for f in agent.frames if f["type"] == "intruder"]


def test_a_stranger_who_was_faster_is_cut(agent: Agent) -> None:
    port = start(agent, PEERS)
    with _first_connection(port) as stranger:
        stranger.settimeout(ANSWER_S)
        while stranger.recv(1):
            continue
    assert connects(port, "127.0.0.2")


def _first_connection(port: int) -> socket.socket:
    while True:
        client = socket.socket()
        try:
            client.connect(("127.0.0.1", port))
        except ConnectionRefusedError:
            client.close()  # nothing listens there yet
        else:
            return client


def test_a_second_listener_is_guarded_as_well(agent: Agent) -> None:
    port = start(agent, PEERS)
    eventually(lambda: rejected(port), "the guard")
    (agent.folder / "again").touch()
    eventually(lambda: "again" in agent.output("worker:0"), "the second listener")
    eventually(lambda: rejected(port) and connects(port, "127.0.0.2"), "its guard")


def test_the_port_is_free_when_the_task_has_ended(agent: Agent) -> None:
    port = start(agent, PEERS)
    eventually(lambda: rejected(port), "the guard")
    agent.stop("worker:0", grace_s=0)
    agent.wait("settled", timeout_s=20)
    eventually(lambda: _is_refused(port), "nobody listens")


def _is_refused(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED


def test_a_server_that_the_runtime_tells_of(agent: Agent) -> None:
    code = (
        "import json, os\n"
        "event = json.dumps({'type': 'server', 'port': int(sys.argv[1])}) + '\\n'\n"
        "os.write(int(os.environ['TFCLUSTER_EVENTS']), event.encode())\n"
    )
    [port] = hold(agent, 1)
    code = ANSWER.replace("s = listen()\n", f"s = listen()\n{code}", 1)
    argv = (PYTHON, "-c", code, str(port), str(agent.folder / "again"))
    agent.start("ps:0", *argv, port=port, peers=PEERS)
    eventually(lambda: rejected(port), "the guard")
    assert connects(port, "127.0.0.2")


def test_without_peers_everybody_may_connect(agent: Agent) -> None:
    port = start(agent, None)
    agent.wait("listening", timeout_s=20)
    assert connects(port, "127.0.0.1")


def test_a_program_that_is_not_watched_is_left_alone(agent: Agent) -> None:
    port = start(agent, PEERS, watched=False)
    eventually(lambda: connects(port, "127.0.0.1"), "the listener")


def test_networks_that_are_none_are_said(agent: Agent) -> None:
    port = start(agent, "nonsense")
    note = agent.wait("note", timeout_s=20)["text"]
    assert f"warning: port {port} of worker:0 is open to any client" in note
    assert "'nonsense'" in note


def test_a_server_that_cannot_be_guarded_is_said(agent: Agent) -> None:
    port = _free()
    code = ANSWER.replace("    s.setsockopt(", "    0 and s.setsockopt(")
    argv = (PYTHON, "-c", code, str(port), str(agent.folder / "again"))
    agent.start("worker:0", *argv, port=port, watched=True, peers=PEERS)
    note = agent.wait("note", timeout_s=20)["text"]
    assert f"port {port} of worker:0 is open to any client" in note
    assert "Address already in use" in note
    assert connects(port, "127.0.0.1")


def _free() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])
