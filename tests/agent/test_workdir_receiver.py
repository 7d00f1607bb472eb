"""Tests of copying the user's files to a host that does not share them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.agent.client import Agent
from tfcluster.agent.workdir_receiver import MEMORY, merge
from tfcluster.launcher.workdir_listing import Listing, listing
from tfcluster.plan.model import Sync
from tfcluster.protocol.frames import encode
from tfcluster.protocol.wire import Frame

OLD, NEW, OTHER = "old", "new", "other"


@pytest.mark.parametrize(
    ("known", "here", "wanted", "done"),
    [
        ((), None, NEW, "take"),
        ((), NEW, NEW, "nothing"),
        ((), OTHER, NEW, "conflict"),
        ((OLD,), OLD, NEW, "take"),
        ((OLD,), None, NEW, "take"),
        ((OLD,), OTHER, OLD, "nothing"),  # a task wrote it
        ((OLD,), OTHER, NEW, "conflict"),
        ((OLD,), OLD, None, "delete"),
        ((OLD,), OTHER, None, "nothing"),
        ((OLD,), None, None, "nothing"),
        ((OLD, NEW), NEW, OTHER, "take"),  # after an interrupted sync
        ((OLD, NEW), OLD, OTHER, "take"),
    ],
)
def test_merge(
    known: tuple[str, ...], here: str | None, wanted: str | None, done: str
) -> None:
    plan = merge(
        {} if wanted is None else {"a": wanted},
        {"a": known} if known else {},
        {"a": here},
    )
    every = {"take": plan.fetch, "delete": plan.delete, "conflict": plan.conflicts}
    assert [word for word, paths in every.items() if paths] == [
        word for word in (done,) if word != "nothing"
    ]


@pytest.mark.parametrize(
    ("here", "wanted", "done"),
    [
        (NEW, OLD, "nothing"),  # it has changed since it went to the source
        (OLD, NEW, "take"),  # it was changed at the source since
        (NEW, OTHER, "conflict"),
        (OLD, None, "nothing"),  # it is not ours to delete
    ],
)
def test_merge_of_results_that_were_returned(
    here: str, wanted: str | None, done: str
) -> None:
    offered = {} if wanted is None else {"a": wanted}
    plan = merge(offered, {}, {"a": here}, {"a": (OLD,)})
    every = {"take": plan.fetch, "delete": plan.delete, "conflict": plan.conflicts}
    assert [word for word, paths in every.items() if paths] == [
        word for word in (done,) if word != "nothing"
    ]


class Folders:
    """The user's folder and the host's; each sync starts a new agent."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.mine = path / "mine"
        self.theirs = path / "theirs"
        self.mine.mkdir()
        self.asked: list[Frame] = []

    def listed(self, *, shared: bool = False) -> Listing:
        found = listing(self.mine, Sync(str(self.theirs), ("*.skip",)))
        # Both sides are on one machine, so every file would be recognised as shared.
        return found if shared else _apart(found)

    def sync(self, found: Listing | None = None) -> Frame:
        """Sync the files; returns the agent's final answer."""
        files = found or self.listed()
        with Agent(self.path / "agent") as agent:
            for request in files.sync_requests():
                agent.send_bytes(encode(request))
            return self.served(agent, files)

    def served(self, agent: Agent, files: Listing) -> Frame:
        kinds = {"wants", "synced", "unsynced"}
        while True:
            answer = agent.wait_for(lambda frame: frame["type"] in kinds)
            if answer["type"] != "wants":
                return answer
            self.asked.append(answer)
            for part in answer["parts"]:
                agent.send_bytes(encode(files.part(*part)))

    def there(self) -> dict[str, str]:
        found = {
            str(path.relative_to(self.theirs)): path.read_text(errors="replace")
            for path in self.theirs.rglob("*")
            if path.is_file() and path.name != MEMORY
        }
        return dict(sorted(found.items()))


def _apart(found: Listing) -> Listing:
    return Listing(found.root, found.folder, found.entries, (("/no/such/file", 1),))


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    return Folders(tmp_path)


def test_files_arrive_with_their_permissions_and_leave_nothing_else(
    folders: Folders,
) -> None:
    (folders.mine / "sub").mkdir()
    (folders.mine / "train.py").write_text("print()")
    (folders.mine / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (folders.mine / "sub" / "run.sh").chmod(0o750)
    (folders.mine / "empty").write_text("")
    (folders.mine / "big.skip").write_text("x")
    said = folders.sync()
    assert said == {"type": "synced", "cwd": str(folders.theirs), "count": 3}
    assert folders.there() == {
        "empty": "",
        "sub/run.sh": "#!/bin/sh\n",
        "train.py": "print()",
    }
    assert (folders.theirs / "sub" / "run.sh").stat().st_mode & 0o777 == 0o750
    assert not list(folders.theirs.glob(".tfcluster-incoming*"))


def test_only_what_has_changed_is_sent(folders: Folders) -> None:
    (folders.mine / "a").write_text("1")
    (folders.mine / "b").write_text("1")
    folders.sync()
    folders.asked.clear()
    assert folders.sync()["count"] == 0
    assert folders.asked == []
    (folders.mine / "b").write_text("2")
    assert folders.sync()["count"] == 1
    assert folders.there() == {"a": "1", "b": "2"}


def test_a_large_file_comes_in_portions(folders: Folders) -> None:
    data = os.urandom(3_000_001)
    (folders.mine / "data").write_bytes(data)
    assert folders.sync()["type"] == "synced"
    assert (folders.theirs / "data").read_bytes() == data
    assert len(folders.asked) == 3


def test_what_tasks_wrote_stays(folders: Folders) -> None:
    (folders.mine / "history.csv").write_text("of here")
    folders.sync()
    (folders.theirs / "history.csv").write_text("of there")
    (folders.theirs / "model.keras").write_text("weights")
    assert folders.sync()["count"] == 0
    assert folders.there() == {"history.csv": "of there", "model.keras": "weights"}


def test_what_is_gone_here_goes_there_unless_it_was_changed(folders: Folders) -> None:
    (folders.mine / "sub" / "deep").mkdir(parents=True)
    (folders.mine / "sub" / "deep" / "a").write_text("1")
    (folders.mine / "b").write_text("1")
    folders.sync()
    (folders.theirs / "b").write_text("mine")
    (folders.mine / "b").unlink()
    (folders.mine / "sub" / "deep" / "a").unlink()
    folders.sync()
    assert folders.there() == {"b": "mine"}
    assert not (folders.theirs / "sub").exists()


def test_what_was_changed_on_both_sides_is_named_and_nothing_is_touched(
    folders: Folders,
) -> None:
    for name in ("a", "b", "c"):
        (folders.mine / name).write_text("1")
    folders.sync()
    for name in ("a", "b"):
        (folders.theirs / name).write_text("there")
        (folders.mine / name).write_text("here")
    (folders.mine / "c").write_text("here")
    said = folders.sync()
    assert said["type"] == "unsynced"
    assert "changed both on this machine and in" in said["cause"]
    assert ": a, b (" in said["cause"]
    assert folders.there() == {"a": "there", "b": "there", "c": "1"}


def test_a_break_in_the_middle_changes_nothing(folders: Folders) -> None:
    (folders.mine / "a").write_text("1")
    folders.sync()
    (folders.mine / "a").write_text("2")
    (folders.mine / "data").write_bytes(bytes(2_000_000))
    files = folders.listed()
    with Agent(folders.path / "agent") as agent:
        for request in files.sync_requests():
            agent.send_bytes(encode(request))
        first = agent.wait("wants")["parts"]
        agent.send_bytes(encode(files.part(*first[0])))
    assert folders.there() == {"a": "1"}
    assert folders.sync()["count"] == 2
    assert folders.there()["a"] == "2"


def test_a_file_that_changes_while_it_is_sent_is_reported(folders: Folders) -> None:
    (folders.mine / "a").write_text("1")
    files = folders.listed()
    (folders.mine / "a").write_text("2")
    assert folders.sync(files)["cause"] == "a changed while it was sent"
    (folders.mine / "a").unlink()
    assert "can no longer be read" in folders.sync(files)["cause"]
    assert folders.there() == {}


def test_who_shares_the_files_is_sent_none(folders: Folders) -> None:
    (folders.mine / "a").write_text("1")
    said = folders.sync(folders.listed(shared=True))
    assert said == {"type": "synced", "cwd": str(folders.mine), "count": 0}
    assert not folders.theirs.exists()


def test_a_folder_that_cannot_be_made_is_named(folders: Folders) -> None:
    (folders.mine / "a").write_text("1")
    folders.theirs.write_text("a file")
    said = folders.sync()
    assert said["type"] == "unsynced"
    assert str(folders.theirs) in said["cause"]


@pytest.mark.parametrize("path", ["../a", "/etc/a", "a/../../b", ""])
def test_no_path_leads_out_of_the_folder(folders: Folders, path: str) -> None:
    with Agent(folders.path / "agent") as agent:
        agent.send(
            type="sync",
            folder=str(folders.theirs),
            original="/x",
            inodes=[],
            files=[[path, 1, 0, 0o644, "0" * 64]],
            last=True,
        )
        assert "not a path within a folder" in agent.wait("fault")["cause"]
