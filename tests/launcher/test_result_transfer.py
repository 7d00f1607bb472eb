"""Tests of fetching from a host that misbehaves; real agents are in tests/agent."""

from __future__ import annotations

import base64
import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tfcluster.launcher.result_placement import ResultFolder
from tfcluster.launcher.result_transfer import (
    HostTransfer,
    Inbox,
    Outcome,
    Wanted,
    Window,
)
from tfcluster.protocol.wire import Frame
from tfcluster.record.fetched import FetchedFiles
from tfcluster.record.paths import RunPaths

Answer = Callable[[Frame], list[Frame]]


class Trial:
    """A transfer from a host that answers as ``answer`` says."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self.root = path / "work"
        self.root.mkdir()
        self.outcome = Outcome("h1")
        self.inbox = Inbox()
        self.asked: list[Frame] = []
        self._answer = answer
        fetched = FetchedFiles(RunPaths(path))
        self.transfer = HostTransfer(
            self.outcome,
            Wanted("~/x", (), ("*.keras",)),
            ResultFolder(self.root, "h1", fetched, launched_ns=0),
            send=self.send,
            inbox=self.inbox,
            numbers=itertools.count(1),
            stopped=lambda: None,
            stall_s=0.3,
        )

    def send(self, frame: Frame) -> None:
        self.asked.append(frame)
        for each in self._answer(frame):
            self.inbox.put({"number": frame.get("number"), **each})

    def files(self) -> list[str]:
        return sorted(str(p.relative_to(self.root)) for p in self.root.rglob("*"))


def listed(*rows: list[object]) -> Frame:
    keys = {"shared": False, "folder": "/x", "refused": [], "more": 0, "last": True}
    return {"type": "listed", "files": list(rows), **keys}


def host(data: bytes, digest: str | None = None, path: str = "a.keras") -> Answer:
    """A host with one file, which it sends in one piece."""
    sent: set[int] = set()

    def answer(frame: Frame) -> list[Frame]:
        if frame["type"] == "list":
            return [listed([path, len(data), 1, 0o644])]
        if frame["type"] == "read":
            return [{"type": "reading", "offset": 0}]
        if frame["type"] != "more":
            return []
        if frame["number"] not in sent:
            sent.add(frame["number"])
            text = base64.b64encode(data).decode()
            return [{"type": "piece", "offset": 0, "data": text}]
        right = hashlib.sha256(data).hexdigest()
        return [{"type": "complete", "digest": digest or right, "changed": False}]

    return answer


def test_a_file_arrives(tmp_path: Path) -> None:
    trial = Trial(tmp_path, host(b"weights"))
    trial.transfer.run()
    assert trial.outcome.well
    assert (trial.root / "a.keras").read_bytes() == b"weights"
    assert trial.asked[-1]["type"] == "returned"


def test_a_wrong_digest_is_tried_twice_and_leaves_nothing(tmp_path: Path) -> None:
    trial = Trial(tmp_path, host(b"weights", digest="other"))
    trial.transfer.run()
    assert [each["type"] for each in trial.asked].count("read") == 2
    assert "another digest" in trial.outcome.missed.named[0][1]
    assert trial.files() == []


@pytest.mark.parametrize(
    "path",
    [
        "../a.keras",
        "/tmp/a.keras",
        "train.py",
        ".git/a.keras",
        "a/../b.keras",
        "results-by-host/h2/a.keras",
    ],
)
def test_names_that_nobody_asked_for_are_refused_by_name(
    tmp_path: Path, path: str
) -> None:
    trial = Trial(tmp_path, host(b"x", path=path))
    trial.transfer.run()
    assert [name for name, _ in trial.outcome.missed.named] == [path]
    assert trial.files() == []
    assert {each["type"] for each in trial.asked} == {"list"}


@pytest.mark.parametrize(
    "frame",
    [
        listed(["a.keras", -1, 1, 0o644]),
        listed(["a.keras", "1", 1, 0o644]),
        listed(["a.keras"]),
        listed(["a.keras", 1 << 63, 1, 0o644]),
        listed(["a.keras", 1, 1 << 63, 0o644]),
        listed(["a.keras", 1, 1, -1]),
        listed(["a.keras", 1, 1, 1 << 70]),
        {**listed(), "refused": [3]},
    ],
)
def test_nonsense_ends_the_fetch(tmp_path: Path, frame: Frame) -> None:
    trial = Trial(tmp_path, lambda asked: [frame])
    trial.transfer.run()
    assert "violated the protocol" in (trial.outcome.cause or "")


def test_a_file_that_has_no_room_here_is_not_begun(tmp_path: Path) -> None:
    answer = host(b"weights")
    rows = listed(["a.keras", 1 << 60, 1, 0o644], ["b.keras", 7, 1, 0o644])
    trial = Trial(
        tmp_path, lambda asked: [rows] if asked["type"] == "list" else answer(asked)
    )
    trial.transfer.run()
    ((path, cause),) = trial.outcome.missed.named
    assert path == "a.keras"
    assert "are free in" in cause
    assert trial.files() == ["b.keras"]


def test_a_file_that_cannot_be_read_there_leaves_nothing_here(tmp_path: Path) -> None:
    answer = host(b"weights")
    gone: list[Frame] = [{"type": "unread", "cause": "it is gone"}]
    trial = Trial(
        tmp_path, lambda asked: gone if asked["type"] == "read" else answer(asked)
    )
    trial.transfer.run()
    assert trial.outcome.missed.named == [("a.keras", "it is gone")]
    assert trial.files() == []


def test_a_list_without_an_end(tmp_path: Path) -> None:
    frame = {**listed(["a.keras", 1, 1, 0o644]), "last": False}
    trial = Trial(tmp_path, lambda asked: [frame] * 12_000)
    trial.transfer.run()
    assert trial.outcome.cause == "its agent lists too many files"


def test_a_host_that_sends_too_much(tmp_path: Path) -> None:
    answer = host(b"weights")
    trial = Trial(
        tmp_path,
        lambda asked: (
            [listed(["a.keras", 3, 1, 0o644])]
            if asked["type"] == "list"
            else answer(asked)
        ),
    )
    trial.transfer.run()
    assert "too much" in (trial.outcome.cause or "")
    assert not (trial.root / "a.keras").exists()


def test_a_silent_host_is_given_up(tmp_path: Path) -> None:
    trial = Trial(tmp_path, lambda asked: [])
    trial.transfer.run()
    assert trial.outcome.cause == "it sent nothing for 0.3 s"
    assert trial.outcome.over


def test_a_lost_host_names_what_is_missing(tmp_path: Path) -> None:
    answer = host(b"weights")
    trial = Trial(
        tmp_path, lambda asked: answer(asked) if asked["type"] == "list" else []
    )
    trial.inbox.end("contact lost")
    trial.transfer.run()
    assert trial.outcome.cause == "contact lost"
    assert trial.outcome.missed.named == [("a.keras", "not fetched")]


def test_a_slow_line_gets_few_pieces() -> None:
    window = Window()
    for _ in range(100):
        window.returned(0.01)
    assert window.pieces == 32
    for _ in range(10):
        window.returned(1.0)
    assert window.pieces == 1
