"""Tests of fetching from a host that misbehaves; real agents are in tests/agent."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tfcluster.launcher.result_placement import ResultFolder
from tfcluster.launcher.result_transfer import (
    HostTransfer,
    Inbox,
    TransferOutcome,
    WantedFiles,
)
from tfcluster.protocol.messages import (
    Complete,
    Listed,
    Piece,
    Result,
    ResultsMessage,
    Unread,
)
from tfcluster.protocol.requests import List, More, Read, Request, Returned

Answer = Callable[[Request], list[ResultsMessage]]


class Trial:
    """A transfer from a host that answers as ``answer`` says."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self.root = path / "work"
        self.root.mkdir()
        self.outcome = TransferOutcome("h1")
        self.inbox = Inbox()
        self.asked: list[Request] = []
        self._answer = answer
        self.transfer = HostTransfer(
            self.outcome,
            WantedFiles("~/x", (), ("*.keras",)),
            ResultFolder(self.root, "h1"),
            send=self.send,
            inbox=self.inbox,
            stall_s=0.3,
        )

    def send(self, request: Request) -> None:
        self.asked.append(request)
        for each in self._answer(request):
            self.inbox.put(each)

    def files(self) -> list[str]:
        return sorted(str(p.relative_to(self.root)) for p in self.root.rglob("*"))


def listed(request: Request, *files: Result, last: bool = True) -> Listed:
    assert isinstance(request, List)
    return Listed(request.number, False, "/x", files, (), last)


def a_file(size: int, path: str = "a.keras") -> Result:
    return Result(path, size, 1, 0o644)


def host(
    data: bytes,
    digest: str | None = None,
    path: str = "a.keras",
    listing: tuple[Result, ...] = (),
) -> Answer:
    """A host with one file, which it sends in one piece."""
    sent: set[int] = set()

    def answer(request: Request) -> list[ResultsMessage]:
        match request:
            case List():
                return [listed(request, *(listing or (a_file(len(data), path),)))]
            case More(number) if number not in sent:
                sent.add(number)
                return [Piece(number, 0, base64.b64encode(data).decode())]
            case More(number):
                right = hashlib.sha256(data).hexdigest()
                return [Complete(number, digest or right, False)]
        return []

    return answer


def test_a_file_arrives(tmp_path: Path) -> None:
    trial = Trial(tmp_path, host(b"weights"))
    trial.transfer.run()
    assert trial.outcome.well
    assert (trial.root / "a.keras").read_bytes() == b"weights"
    assert isinstance(trial.asked[-1], Returned)


def test_a_wrong_digest_leaves_nothing(tmp_path: Path) -> None:
    trial = Trial(tmp_path, host(b"weights", digest="other"))
    trial.transfer.run()
    assert "another digest" in trial.outcome.missed[0][1]
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
    assert [name for name, _ in trial.outcome.missed] == [path]
    assert trial.files() == []
    assert {type(each) for each in trial.asked} == {List}


@pytest.mark.parametrize("answer", [Piece(1, 0, "YQ=="), Unread(1, "gone")])
def test_another_answer_ends_the_fetch(tmp_path: Path, answer: ResultsMessage) -> None:
    trial = Trial(tmp_path, lambda asked: [answer])
    trial.transfer.run()
    assert "violated the protocol" in (trial.outcome.cause or "")


def test_a_file_that_has_no_room_here_is_not_begun(tmp_path: Path) -> None:
    files = (a_file(1 << 60), a_file(7, "b.keras"))
    trial = Trial(tmp_path, host(b"weights", listing=files))
    trial.transfer.run()
    ((path, cause),) = trial.outcome.missed
    assert path == "a.keras"
    assert "are free in" in cause
    assert trial.files() == ["b.keras"]


def test_a_file_that_cannot_be_read_there_leaves_nothing_here(tmp_path: Path) -> None:
    answer = host(b"weights")
    trial = Trial(
        tmp_path,
        lambda asked: (
            [Unread(asked.number, "it is gone")]
            if isinstance(asked, Read)
            else answer(asked)
        ),
    )
    trial.transfer.run()
    assert trial.outcome.missed == [("a.keras", "it is gone")]
    assert trial.files() == []


def test_a_list_without_an_end(tmp_path: Path) -> None:
    trial = Trial(
        tmp_path, lambda asked: [listed(asked, a_file(1), last=False)] * 12_000
    )
    trial.transfer.run()
    assert trial.outcome.cause == "its agent lists too many files"


def test_a_host_that_sends_too_much(tmp_path: Path) -> None:
    trial = Trial(tmp_path, host(b"weights", listing=(a_file(3),)))
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
        tmp_path, lambda asked: answer(asked) if isinstance(asked, List) else []
    )
    trial.inbox.end("contact lost")
    trial.transfer.run()
    assert trial.outcome.cause == "contact lost"
    assert trial.outcome.missed == [("a.keras", "not fetched")]
