"""Copies of files that the chief has saved, under the names of other ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfcluster.runtime.files.saved_copies import (
    Saved,
    described,
    link,
    packed,
    unpack,
)

WAYS = ("linked", "sent")


def checkpoint(folder: Path, name: str, number: int) -> None:
    (folder / f"{name}-{number}.index").write_text(f"index {number}")
    (folder / f"{name}-{number}.data-00000-of-00001").write_text(f"data {number}")
    (folder / "checkpoint").write_text(f'model_checkpoint_path: "{name}-{number}"\n')


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def copy(way: str, found: Saved | None, path: Path) -> None:
    assert found is not None
    saved = Saved.of_words(found.as_words())
    assert saved.is_here()
    if way == "linked":
        link(saved, str(path))
    else:
        unpack(saved, packed(saved), str(path))


def test_a_file_of_another_name(tmp_path: Path, way: str) -> None:
    theirs, ours = tmp_path / "a.keras", tmp_path / "deep" / "b.keras"
    for text in ("first", "second"):
        theirs.write_text(text)
        copy(way, described(str(theirs), prefix=False), ours)
        copy(way, described(str(theirs), prefix=False), ours)
        assert ours.read_text() == text
    theirs.unlink()
    assert ours.read_text() == "second"
    assert [path.name for path in ours.parent.iterdir()] == ["b.keras"]


def test_a_folder_keeps_what_else_is_in_it(tmp_path: Path, way: str) -> None:
    theirs, ours = tmp_path / "a", tmp_path / "b"
    for folder in (theirs, ours):
        (folder / "deep").mkdir(parents=True)
        (folder / "notes.txt").write_text(folder.name)
    found = described(str(theirs), prefix=False, since=2**40)
    assert found is None
    (theirs / "deep" / "saved.pb").write_text("saved")
    (theirs / "notes.txt").unlink()
    copy(way, described(str(theirs), prefix=False), ours)
    assert (ours / "deep" / "saved.pb").read_text() == "saved"
    assert (ours / "notes.txt").read_text() == "b"


def test_checkpoints_of_another_prefix(tmp_path: Path, way: str) -> None:
    theirs, ours = tmp_path / "a", tmp_path / "b"
    theirs.mkdir()
    ours.mkdir()
    (theirs / "one.txt").write_text("no checkpoint")
    (ours / "other-1.txt").write_text("not ours to remove")
    for number in (1, 2):
        checkpoint(theirs, "one", number)
        copy(way, described(str(theirs / "one"), prefix=True), ours / "other")
        for file in theirs.glob("one-1.*"):
            file.unlink()
    names = {path.name for path in ours.iterdir()}
    data = {"other-2.index", "other-2.data-00000-of-00001"}
    assert names == {"checkpoint", "other-1.txt", *data}
    assert (ours / "checkpoint").read_text() == 'model_checkpoint_path: "other-2"\n'


def test_no_way_out_of_the_folder() -> None:
    with pytest.raises(ValueError, match="etc"):
        Saved.of_words(["a", "folder", ["/../../etc/passwd"], [1]])


def test_what_is_not_seen_is_not_here(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("abc")
    found = described(str(path), prefix=False)
    assert found is not None
    path.write_text("abcd")
    assert not found.is_here()
    path.unlink()
    assert not found.is_here()
    assert described(str(path), prefix=False) is None
