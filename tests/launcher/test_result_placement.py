"""Tests of where results go, and of what they may replace."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfcluster.launcher.result_placement import (
    PartialFile,
    PlacementError,
    ResultFolder,
    host_folder,
)
from tfcluster.protocol.messages import Result


def test_names_of_hosts() -> None:
    assert host_folder("../x:22/y") == "results-by-host/_x:22_y"
    assert host_folder("..") == "results-by-host/_"


class Here:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.root = path / "work"
        self.root.mkdir()

    def folder(self, *, force: bool = False, apart: bool = False) -> ResultFolder:
        return ResultFolder(self.root, "h1", force=force, apart=apart)

    def receive(
        self, path: str, text: str, folder: ResultFolder | None = None, mine: str = ""
    ) -> str | None:
        """Put a file into place; returns why it was not moved there.

        ``mine`` is written to the same path while the file arrives.
        """
        folder = folder or self.folder()
        remote = Result(path, len(text), 10**9, 0o666)
        with folder.partial(remote) as partial:
            partial.begin(len(text))
            partial.write(text.encode())
            if mine:
                (self.root / path).write_text(mine)
            return folder.place(partial, remote)

    def files(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.root)): path.read_text()
            for path in self.root.rglob("*")
            if path.is_file()
        }


@pytest.fixture
def here(tmp_path: Path) -> Here:
    return Here(tmp_path)


def test_a_file_is_put_into_place(here: Here) -> None:
    assert here.receive("logs/a", "text") is None
    assert here.files() == {"logs/a": "text"}
    status = (here.root / "logs" / "a").stat()
    assert status.st_mtime_ns == 10**9
    assert status.st_mode & 0o777 == 0o644
    for size, time_ns in ((4, 10**9), (5, 10**9), (4, 1)):
        here_already = here.folder().has(Result("logs/a", size, time_ns, 0o644))
        assert here_already == ((size, time_ns) == (4, 10**9))
    assert not here.folder().has(Result("logs/b", 4, 10**9, 0o644))
    assert here.receive("logs/a", "text, again") is None
    assert here.files() == {"logs/a": "text, again"}


def test_a_newer_file_here_is_kept(here: Here) -> None:
    (here.root / "a").write_text("mine")
    changed_ns = (here.root / "a").stat().st_mtime_ns
    same, older = (Result("a", 1, changed_ns - n, 0o644) for n in (0, 1))
    assert here.folder().objection(same) is None
    assert here.folder().objection(older) == "the one here is newer"
    assert here.receive("a", "forced", here.folder(force=True)) is None
    assert here.files() == {"a": "forced"}


def test_a_file_that_changes_here_while_it_is_sent_is_kept(here: Here) -> None:
    assert here.receive("a", "x", mine="mine") == "the one here is newer"
    assert here.files() == {"a": "mine"}


def test_hosts_are_kept_apart(here: Here) -> None:
    here.receive("logs/a", "text", here.folder(apart=True))
    assert here.files() == {"results-by-host/h1/logs/a": "text"}


def test_no_link_leads_out(here: Here) -> None:
    outside = here.path / "outside"
    outside.mkdir()
    (here.root / "logs").symlink_to(outside)
    with pytest.raises(PlacementError, match="leads out of the working directory"):
        here.receive("logs/a", "text")
    (here.root / "b").symlink_to(outside / "b")
    with pytest.raises(PlacementError, match="is not a regular file"):
        here.receive("b", "text", here.folder(force=True))
    assert not list(outside.iterdir())
    assert [path.name for path in here.root.iterdir() if not path.is_symlink()] == []


def test_a_file_where_a_folder_should_be(here: Here) -> None:
    (here.root / "logs").write_text("")
    with pytest.raises(PlacementError, match="a file is here"):
        here.folder().has(Result("logs/a", 1, 1, 0o644))


def test_what_does_not_arrive_whole_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_bytes(b"left by a process that was killed")
    with PartialFile(path) as partial:
        with pytest.raises(PlacementError, match="another fetch"):
            PartialFile(path)
        for data in (b"12345", b"new"):
            partial.begin(len(data))
            partial.write(data)
        assert path.read_bytes() == b"new"
    assert not path.exists()
