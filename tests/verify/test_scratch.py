"""Tests of the folders that a verify works in."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tfcluster.verify.scratch import PREFIX, Scratch, remove_abandoned


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


DYING = """
from tfcluster.verify.scratch import Scratch
found = Scratch().folder
(found / "alone").mkdir()
(found / "alone" / "model").write_text("x")
print(found)
"""


def abandoned(tmp_path: Path) -> Path:
    """A folder whose verify has died: nobody holds its lock."""
    done = subprocess.run(
        [sys.executable, "-c", DYING],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return Path(done.stdout.strip())


def test_what_a_dead_verify_left_is_removed(tmp_path: Path) -> None:
    folder = abandoned(tmp_path)
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
    folder = abandoned(tmp_path)
    (folder / "link").symlink_to(theirs)
    remove_abandoned()
    assert (theirs / "lock").exists()
    assert not folder.exists()


def test_the_lock_remains_while_a_launcher_has_it() -> None:
    """Launchers inherit it: a folder is in use until the last of them has ended."""
    scratch = Scratch()
    assert scratch._lock is not None
    inherited = os.dup(scratch._lock._descriptor)
    os.close(scratch._lock._descriptor)
    remove_abandoned()
    assert scratch.folder.exists()
    os.close(inherited)
    remove_abandoned()
    assert not scratch.folder.exists()
