"""Tests of sending files that tasks have written, by the real agent."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent.client import Agent
from tfcluster.agent.file_names import (
    RESULT_PIECE_BYTES,
    is_inside,
    is_never,
    is_wanted,
)
from tfcluster.protocol.wire import Frame


@pytest.mark.parametrize(
    ("path", "patterns", "wanted"),
    [
        ("a/model.keras", ["*.keras"], True),
        ("logs/a/b", ["logs/"], True),
        ("out/logs/a", ["logs/"], True),
        ("logs", ["logs/"], False),  # a file
        ("logs", ["logs"], True),
        ("out/a.csv", ["out/*.csv"], True),
        ("x/out/a.csv", ["out/*.csv"], False),
        ("model.keras.old", ["*.keras"], False),
    ],
)
def test_patterns(path: str, patterns: list[str], wanted: bool) -> None:
    assert is_wanted(path, patterns) is wanted


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../a", "a/../b", "a//b", ".", "", "a/", "a\0b", "a/./b"]
)
def test_names_that_lead_elsewhere(path: str) -> None:
    assert not is_inside(path)


def test_what_is_never_sent() -> None:
    assert is_never(".git/config")
    assert is_never("a/.tfcluster-sync.json")
    assert not is_never("git/config")


class Host:
    """A folder on the agent's side, and the launcher's requests."""

    def __init__(self, agent: Agent, folder: Path) -> None:
        self.agent = agent
        self.folder = folder
        self._number = 0

    def list(self, *patterns: str, inodes: object = ()) -> Frame:
        self._number += 1
        self.agent.send(
            type="list",
            number=self._number,
            folder=str(self.folder),
            inodes=list(inodes) if isinstance(inodes, tuple) else inodes,
            patterns=list(patterns),
        )
        files: list[object] = []
        refused: list[object] = []
        kinds = ("listed", "unlisted")
        while True:
            frame = self.agent.wait_for(lambda found: found["type"] in kinds)
            files += frame.get("files") or []
            refused += frame.get("refused") or []
            if frame.get("last", True):
                return {**frame, "files": files, "refused": refused}

    def read(self, path: str, size: int) -> None:
        self._number += 1
        self.agent.send(type="read", number=self._number, path=path, size=size)

    def more(self) -> Frame:
        self.agent.send(type="more", number=self._number)
        kinds = ("piece", "complete", "unread")
        return self.agent.wait_for(lambda found: found["type"] in kinds)

    def rest(self) -> tuple[bytes, Frame]:
        data = b""
        while (frame := self.more())["type"] == "piece":
            data += base64.b64decode(frame["data"])
        return data, frame


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    folder = tmp_path / "work"
    folder.mkdir()
    with Agent(tmp_path / "agent") as agent:
        yield Host(agent, folder)


def test_a_list_names_what_matches_and_what_cannot_be_sent(host: Host) -> None:
    root = host.folder
    (root / "logs").mkdir()
    (root / "logs" / "new\nline").write_text("1")
    Path(os.fsdecode(bytes(root) + b"/logs/\xff")).write_text("22")
    (root / "a.keras").write_text("333")
    (root / "other").write_text("")
    (root / ".git").mkdir()
    (root / ".git" / "b.keras").write_text("")
    os.mkfifo(root / "c.keras")
    (root / "d.keras").symlink_to("/etc/hostname")
    (root / "e.keras").symlink_to("a.keras")
    (root / "f.keras").symlink_to("nothing")
    said = host.list("*.keras", "logs/")
    assert {row[0]: row[1] for row in said["files"]} == {
        "a.keras": 3,
        "e.keras": 3,
        "logs/new\nline": 1,
        "logs/\udcff": 2,
    }
    assert dict(said["refused"]) == {
        "c.keras": "it is not a regular file",
        "d.keras": "it is a link that leads out of the working directory",
        "f.keras": "it is a link to nothing",
    }
    assert not said["shared"]


def test_a_folder_that_cannot_be_read_does_not_hide_the_others(host: Host) -> None:
    (host.folder / "b.keras").write_text("")
    # The path of the deepest one is longer than any that can be opened.
    at = os.open(host.folder, os.O_DIRECTORY)
    for _ in range(17):
        os.mkdir("x" * 250, dir_fd=at)
        inner = os.open("x" * 250, os.O_DIRECTORY, dir_fd=at)
        os.close(at)
        at = inner
    os.close(at)
    said = host.list("*.keras")
    assert [row[0] for row in said["files"]] == ["b.keras"]
    ((folder, cause),) = said["refused"]
    assert folder.startswith("xxx")
    assert cause == "this folder cannot be read: File name too long"


def test_a_host_that_sees_the_same_files_says_so(host: Host) -> None:
    (host.folder / "a.keras").write_text("")
    seen = [[str(host.folder), host.folder.stat().st_ino]]
    assert host.list("*.keras", inodes=seen)["shared"]


def test_a_folder_that_is_not_there(host: Host) -> None:
    host.folder.rmdir()
    said = host.list("*.keras")
    assert said["type"] == "unlisted"
    assert "No such file" in said["cause"]


def test_a_file_comes_in_pieces_that_are_asked_for(host: Host) -> None:
    data = os.urandom(2 * RESULT_PIECE_BYTES + 1)
    (host.folder / "a.keras").write_bytes(data)
    host.list("*.keras")
    host.read("a.keras", len(data))
    # The agent does other work between pieces, and sends none that is not asked for.
    host.agent.send(type="hold", count=0, low=None, high=None)
    host.agent.wait("held")
    assert not host.agent.frames
    arrived, end = host.rest()
    assert arrived == data
    assert end["digest"] == hashlib.sha256(data).hexdigest()
    assert not end["changed"]


def test_a_growing_file_is_sent_up_to_its_listed_size(host: Host) -> None:
    path = host.folder / "log.txt"
    path.write_text("first")
    size = host.list("*.txt")["files"][0][1]
    host.read("log.txt", size)
    with path.open("a") as file:
        file.write(" second")
    arrived, end = host.rest()
    assert arrived == b"first"
    assert end["changed"]
    assert end["digest"] == hashlib.sha256(b"first").hexdigest()


def test_files_that_become_shorter_or_vanish_or_lead_out(host: Host) -> None:
    path = host.folder / "a.keras"
    path.write_text("12345")
    (host.folder / "b.keras").write_text("")
    host.list("*.keras")
    host.read("a.keras", 5)
    path.write_text("")
    assert host.rest()[1]["cause"] == "it became shorter while it was sent"
    path.unlink()
    host.read("a.keras", 5)
    assert host.more()["cause"] == "it is gone"
    path.symlink_to("/etc/hostname")
    host.read("a.keras", 5)
    assert "leads out" in host.more()["cause"]


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("../a.keras", "not a path within"),
        ("/etc/a.keras", "not a path within"),
        ("other", "was not listed"),
    ],
)
def test_what_was_not_listed_is_never_read(host: Host, path: str, cause: str) -> None:
    (host.folder / "other").write_text("")
    host.list("*.keras")
    host.agent.send(type="read", number=9, path=path, size=1)
    assert cause in host.agent.wait("fault")["cause"]
