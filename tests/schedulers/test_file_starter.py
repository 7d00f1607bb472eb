"""Starts agents through a command that passes no input on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.schedulers.standins import env_of, program
from tfcluster.base.errors import StartError
from tfcluster.plan.model import Host
from tfcluster.schedulers import file_starter
from tfcluster.schedulers.file_starter import FileStarter, shared_folder
from tfcluster.schedulers.process_channel import ConnectedChannel, ProcessChannel
from tfcluster.schedulers.starting import AgentChannel


def read_frames(channel: AgentChannel) -> bytes:
    """What an agent writes until its channel is closed."""
    channel.close()
    found = b""
    while data := channel.read():
        found += data
    channel.kill()
    assert b'"type"' in found
    if isinstance(channel, ProcessChannel):
        channel.release(1.0)
    if isinstance(channel, ConnectedChannel):
        channel._connection.close()
    return found


def starter(folder: Path, text: str) -> FileStarter:
    rsh = program(folder, "rsh", text)
    env = env_of(folder, {"HOSTNAME": "here"})
    return FileStarter((sys.executable,), lambda host: (str(rsh), host), env)


RSH = 'shift; exec "$@" < /dev/null\n'


def test_agents_start_and_nothing_is_left(tmp_path: Path) -> None:
    starts = starter(tmp_path, RSH)
    for _ in range(2):  # another agent for the same host, after a restart
        channel = starts.start_agent(Host(name="n2"))
        assert read_frames(channel)
        assert not list((tmp_path / "state").iterdir())


def test_an_agent_on_this_host_is_a_child(tmp_path: Path) -> None:
    channel = starter(tmp_path, "exit 9\n").start_agent(Host(name="here.site"))
    assert read_frames(channel)


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    starts = starter(tmp_path, "echo no such host >&2; exit 1\n")
    with pytest.raises(StartError, match=r"n2: .*exit status 1: no such host"):
        starts.start_agent(Host(name="n2"))
    assert not list((tmp_path / "state").iterdir())


def test_one_that_never_connects_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_starter, "START_S", 0.3)
    with pytest.raises(StartError, match="no agent has connected") as caught:
        starter(tmp_path, "exec sleep 600\n").start_agent(Host(name="n2"))
    assert "able to connect" in str(caught.value.hint)


def test_a_path_that_would_have_to_be_quoted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot be passed to other hosts"):
        shared_folder({"TFCLUSTER_STATE_DIR": str(tmp_path / "a b")})
    assert not list((tmp_path / "a b").iterdir())


def test_files_are_in_the_state_folder_of_all_commands(tmp_path: Path) -> None:
    folder = shared_folder({"XDG_STATE_HOME": str(tmp_path)})
    assert folder.parent == tmp_path / "tfcluster"
    assert folder.stat().st_mode & 0o077 == 0
