"""Tests of where results go, and of what they may replace."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tfcluster.launcher.result_placement import (
    Local,
    PartialFile,
    PlacementError,
    Remote,
    ResultFolder,
    beside,
    is_current,
    objection,
    safe_name,
)
from tfcluster.record.fetched import Copy, FetchedFiles
from tfcluster.record.paths import RunPaths

LAUNCHED = 1000
THERE = Remote("a", 5, 2000, 0o644)
FETCHED = Copy(5, 2000, 5, 2000, "digest")


@pytest.mark.parametrize(
    ("local", "copy", "said"),
    [
        (None, None, None),
        (Local(9, 500, 900), None, None),  # as it was at the launch
        (Local(9, 1500, 1500), None, "the one here was changed since the launch"),
        (Local(9, 3000, 900), None, "the one here is newer"),
        (Local(5, 2000, 2500), FETCHED, None),
        (
            Local(6, 1900, 2500),
            FETCHED,
            "the one here was changed since it was fetched",
        ),
        (Local(0, 0, 0, is_file=False), None, "what is here is not a regular file"),
    ],
)
def test_what_must_not_be_replaced(
    local: Local | None, copy: Copy | None, said: str | None
) -> None:
    assert objection(THERE, local, copy, launched_ns=LAUNCHED) == said


def test_only_what_is_unchanged_on_both_sides_is_current() -> None:
    here = Local(5, 2000, 2500)
    assert is_current(THERE, here, FETCHED)
    assert not is_current(THERE, None, FETCHED)
    assert not is_current(THERE, here, None)
    assert not is_current(THERE, Local(5, 2001, 2500), FETCHED)
    assert not is_current(Remote("a", 5, 2001, 0o644), here, FETCHED)


def test_names_beside() -> None:
    assert beside("logs/a.keras", "node1") == "logs/a.keras.from-node1"
    assert beside("a", "../x:22/y") == "a.from-_x:22_y"
    assert len(beside("x" * 255, "node1")) == 255
    assert safe_name("..") == "_"


class Here:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.root = path / "work"
        self.root.mkdir()
        (path / "run").mkdir()
        self.fetched = FetchedFiles(RunPaths(path / "run"))

    def folder(self, *, force: bool = False, apart: bool = False) -> ResultFolder:
        return ResultFolder(
            self.root, "h1", self.fetched, launched_ns=0, force=force, apart=apart
        )

    def receive(self, path: str, text: str, folder: ResultFolder | None = None) -> str:
        """Put a file into place; returns where it went."""
        folder = folder or self.folder()
        remote = Remote(path, len(text), 10**9, 0o666)
        choice = folder.choose(remote)
        with folder.partial(choice) as partial:
            partial.begin(None, 0)
            partial.write(text.encode())
            choice = folder.place(partial, choice, remote)
        folder.keep(choice, remote, "digest")
        return choice.path

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
    assert here.receive("logs/a", "text") == "logs/a"
    assert here.files() == {"logs/a": "text"}
    found = (here.root / "logs" / "a").stat()
    assert found.st_mtime_ns == 10**9
    assert found.st_mode & 0o777 == 0o644
    assert here.folder().choose(Remote("logs/a", 4, 10**9, 0o644)).current


def test_a_file_that_was_changed_here_is_kept(here: Here) -> None:
    (here.root / "a").write_text("mine")
    assert here.receive("a", "theirs") == "a.from-h1"
    assert here.receive("a", "theirs, again") == "a.from-h1"
    assert here.files() == {"a": "mine", "a.from-h1": "theirs, again"}
    (here.root / "a.from-h1").write_text("mine, too")
    with pytest.raises(PlacementError, match=r"newer; a\.from-h1: the one here is"):
        here.receive("a", "third")
    assert here.receive("a", "forced", here.folder(force=True)) == "a"


def test_a_file_that_changes_here_while_it_is_sent_is_kept(here: Here) -> None:
    folder, remote = here.folder(), Remote("a", 1, 5, 0o644)
    choice = folder.choose(remote)
    with folder.partial(choice) as partial:
        partial.write(b"x")
        (here.root / "a").write_text("mine")
        assert folder.place(partial, choice, remote).path == "a.from-h1"
    assert here.files() == {"a": "mine", "a.from-h1": "x"}


def test_hosts_are_kept_apart(here: Here) -> None:
    folder = here.folder(apart=True)
    assert here.receive("logs/a", "text", folder) == "results-by-host/h1/logs/a"


def test_no_link_leads_out(here: Here) -> None:
    outside = here.path / "outside"
    outside.mkdir()
    (here.root / "logs").symlink_to(outside)
    with pytest.raises(PlacementError, match="leads out of the working directory"):
        here.receive("logs/a", "text")
    (here.root / "b").symlink_to(outside / "b")
    assert here.receive("b", "text") == "b.from-h1"
    assert not list(outside.iterdir())


def test_a_file_where_a_folder_should_be(here: Here) -> None:
    (here.root / "logs").write_text("")
    with pytest.raises(PlacementError, match="a file is here"):
        here.receive("logs/a", "text")


def test_a_part_is_continued_or_begun_again(tmp_path: Path) -> None:
    path = tmp_path / "part"
    with PartialFile(path) as partial:
        partial.write(b"12345")
    with PartialFile(path) as partial:
        whole = partial.proof(lambda: None)
        partial.begin(None, 5)
        partial.write(b"6")
        assert partial.hash.hexdigest() != whole
        with pytest.raises(PlacementError, match="another fetch"):
            PartialFile(path)
    assert path.read_bytes() == b"123456"
    with PartialFile(path) as partial:
        partial.begin(None, 0)
        partial.write(b"new")
    assert path.read_bytes() == b"new"
    (tmp_path / "base").write_bytes(b"abcdef")
    with PartialFile(path) as partial:
        partial.begin(tmp_path / "base", 3)
        partial.write(b"X")
    assert path.read_bytes() == b"abcX"


def test_the_memory_survives_and_ignores_damage(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    fetched = FetchedFiles(paths)
    name = os.fsdecode(b"a\n\xff")
    fetched.put(name, FETCHED)
    fetched.save()
    assert FetchedFiles(paths).get(name) == FETCHED
    paths.fetched.write_text('{"files": {"a": [1], "b": 2}}')
    assert FetchedFiles(paths).get("a") is None
