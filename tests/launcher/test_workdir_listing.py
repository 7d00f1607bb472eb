"""Tests of which of the user's files are copied to hosts that do not share them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tfcluster.agent.file_names import is_excluded
from tfcluster.base.errors import StartError
from tfcluster.launcher import workdir_listing
from tfcluster.launcher.workdir_listing import listing
from tfcluster.plan.model import Sync
from tfcluster.protocol.frames import encode


def paths(root: Path, *exclude: str) -> list[str]:
    return [each.path for each in listing(root, Sync("~/x", exclude)).entries]


def put(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


@pytest.mark.parametrize(
    ("path", "pattern", "excluded"),
    [
        ("a/b.ckpt", "*.ckpt", True),
        ("a/b.ckpt", "b", False),
        ("data", "data", True),
        ("data", "data/", True),
        ("a/data", "data/", True),
        ("data/raw", "data/raw", True),
        ("a/data/raw", "data/raw", False),
        ("a/data/raw", "/data", False),
        ("data", "/data", True),
        ("data/1/x", "data/*", True),
        ("B.CKPT", "*.ckpt", False),
    ],
)
def test_patterns(path: str, pattern: str, excluded: bool) -> None:
    assert is_excluded(path, [pattern]) is excluded


def test_what_is_never_sent(tmp_path: Path) -> None:
    put(tmp_path, "train.py", "pkg/a.py", ".git/config", "pkg/__pycache__/a.pyc")
    put(tmp_path, "env/pyvenv.cfg", "env/bin/python", "logs/1.txt", ".tfcluster-sync")
    (tmp_path / "link").symlink_to("pkg")
    (tmp_path / "file-link").symlink_to("train.py")
    (tmp_path / "nowhere").symlink_to("gone")
    os.mkfifo(tmp_path / "pipe")
    assert paths(tmp_path, "logs") == ["file-link", "pkg/a.py", "train.py"]


def test_too_much_is_refused_and_the_largest_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "small")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(workdir_listing.MAX_BYTES)
    with pytest.raises(StartError, match=r"256 MiB: huge \(256 MiB\), small") as told:
        listing(tmp_path, Sync("~/x", ()))
    assert told.value.hint == "list what tasks do not need under 'workdir: exclude'"
    assert paths(tmp_path, "huge") == ["small"]
    monkeypatch.setattr(workdir_listing, "MAX_FILES", 1)
    with pytest.raises(StartError, match="over 1 files"):
        listing(tmp_path, Sync("~/x", ()))


def test_a_host_gets_only_what_is_listed(tmp_path: Path) -> None:
    put(tmp_path, "a")
    found = listing(tmp_path, Sync("~/x", ()))
    assert found.part(0, 0, 1).data == "YQ=="
    for bad_part in [(1, 0, 1), (0, 0, 1 << 30)]:
        with pytest.raises(IndexError):
            found.part(*bad_part)


def test_a_long_list_fits_into_frames(tmp_path: Path) -> None:
    deep = "/".join(["\U0001f600" * 60] * 8)
    put(tmp_path, *(f"{deep}/{number}" for number in range(1200)))
    asked = list(listing(tmp_path, Sync("~/x", ())).sync_requests())
    assert len(asked) > 1
    assert [each.last for each in asked] == [False] * (len(asked) - 1) + [True]
    assert sum(len(each.files) for each in asked) == 1200
    assert all(encode(each) for each in asked)


def test_results_of_several_hosts_are_not_sent(tmp_path: Path) -> None:
    put(tmp_path, "train.py", "results-by-host/h1/a.keras", "a.keras")
    assert paths(tmp_path) == ["a.keras", "train.py"]
