"""Tests of how processes of a task claim its rank, and of what the agent records."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.agent.client import Agent


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agent]:
    with Agent(tmp_path_factory.mktemp("agent")) as started:
        yield started


# B claims the rank while A has it, C as soon as A has disconnected.
CLAIMS = """
import json, os, socket, subprocess, sys
def claim(name):
    line = socket.socket(socket.AF_UNIX)
    line.connect("\\0" + os.environ["TFCLUSTER_EVENTS_SOCKET"])
    line.sendall(json.dumps({"type": "claim", "command": name}).encode() + b"\\n")
    return line, json.loads(line.makefile().readline())
first, said = claim("A")
print(said["taken"], said["number"])
second, said = claim("B")
print(said["taken"], said["pid"] == os.getpid(), said["command"])
second.sendall(b'{"type":"warning","text":"not mine to say"}\\n')
first.sendall(b'{"type":"step","step":1}\\n{"type":"exchanged"}\\n')
first.close()
third, said = claim("C")
while said["taken"]:
    third, said = claim("C")
print(said["taken"], said["number"], said["command"])
"""


def test_the_first_process_gets_the_rank_and_the_next_one_after_it(
    agent: Agent,
) -> None:
    agent.python("w:0", CLAIMS)
    assert agent.wait("event", task="w:0")["event"] == {"type": "step", "step": 1}
    exited = agent.wait("exited", task="w:0")
    assert exited["tail"] == ["False 0", "True True A", "False 1 A"]
    assert exited["exchanged"] is True
    assert not [frame for frame in agent.frames if frame["type"] == "event"]


STRANGER = """
import os, socket
os.setuid(65534)
line = socket.socket(socket.AF_UNIX)
line.connect("\\0" + os.environ["TFCLUSTER_EVENTS_SOCKET"])
try:
    line.sendall(b'{"type": "claim", "command": "C"}\\n')
    print("answer", line.recv(100))
except OSError:
    print("answer", b"")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_claim_a_rank(agent: Agent) -> None:
    agent.python("w:0", STRANGER)
    assert agent.wait("exited", task="w:0")["tail"] == ["answer b''"]


def test_what_has_exchanged_nothing_says_so(agent: Agent) -> None:
    agent.start("w:0", "true")
    assert agent.wait("exited", task="w:0")["exchanged"] is False


def test_folders_come_first_in_search_paths(agent: Agent) -> None:
    code = "import os; print(os.environ['LOOK'])"
    folders = {"LOOK": "/first"}
    agent.python("bare", code, prepend=folders)
    agent.python("given", code, env={"LOOK": "/other"}, prepend=folders)
    agent.python("empty", code, env={"LOOK": ""}, prepend=folders)
    for task, found in {
        "bare": "/first",
        "given": f"/first{os.pathsep}/other",
        # An empty entry would mean the working directory.
        "empty": "/first",
    }.items():
        assert agent.wait("exited", task=task)["tail"] == [found]
