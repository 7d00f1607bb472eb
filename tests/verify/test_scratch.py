"""Tests of the folders that a verify works in."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tfcluster.verify.scratch import PREFIX, Scratch, remove_abandoned


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def abandoned() -> Path:
    """A folder whose verify has died: nobody holds its lock."""
    pid = os.fork()
    if pid == 0:
        try:
            found = Scratch()
            (found.folder / "alone").mkdir()
            (found.folder / "alone" / "model").write_text("x")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    (folder,) = Path(tempfile.gettempdir()).glob(f"{PREFIX}*")
    return folder


def test_what_a_dead_verify_left_is_removed(tmp_path: Path) -> None:
    folder = abandoned()
    assert (folder / "alone" / "model").exists()
    remove_abandoned()
    assert not list(tmp_path.iterdir())


def test_a_living_verify_keeps_its_folder() -> None:
    living = Scratch()
    (living.folder / "alone").mkdir()
    remove_abandoned()
    assert (living.folder / "alone").is_dir()
    living.remove()
    assert not living.folder.exists()


def test_a_verify_that_begins_keeps_its_folder(tmp_path: Path) -> None:
    """It has no lock yet, or not under its final name."""
    beginning = tmp_path / f"{PREFIX}begins"
    beginning.mkdir()
    (beginning / ".lock.new").touch()
    remove_abandoned()
    assert (beginning / ".lock.new").exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "lock").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(theirs)
    folder = abandoned_beside(tmp_path)
    (folder / "link").symlink_to(theirs)
    remove_abandoned()
    assert (theirs / "lock").exists()
    assert not folder.exists()


def abandoned_beside(tmp_path: Path) -> Path:
    """An abandoned folder as a killed verify leaves it, made by hand."""
    folder = tmp_path / f"{PREFIX}dead"
    folder.mkdir()
    (folder / "lock").touch()
    return folder


def test_the_lock_remains_while_a_launcher_has_it() -> None:
    """Launchers inherit it: a folder is in use until the last of them has ended."""
    scratch = Scratch()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    os.close(scratch._lock)
    remove_abandoned()
    assert scratch.folder.exists()
    os.close(writing)
    os.waitpid(pid, 0)
    remove_abandoned()
    assert not scratch.folder.exists()
