"""What is kept of the layers of ranks, when all ranks have ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tfcluster.agent.layers import _clear


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """The folder under the layer, with the chief's files."""
    folder = tmp_path / "real"
    folder.mkdir()
    (folder / "equal").write_text("equal")
    (folder / "other").write_text("of the chief")
    (folder / "saved").write_text("of the chief")
    (folder / "checkpoint").write_text("of the chief")
    return folder


@pytest.fixture
def files(tmp_path: Path, real: Path) -> Path:
    """The folder of the run, with the layer of rank 1 in attempt 0."""
    folder = tmp_path / "files"
    upper = folder / "1-0.files" / "0" / "upper"
    upper.mkdir(parents=True)
    (folder / "1-0.files" / "0" / "work" / "work").mkdir(0o000, parents=True)
    (folder / "1-0.layers").write_text(json.dumps([str(upper), str(real)]) + "\n")
    (folder / "1-0.saved").write_text(f"{real}/saved\n")
    for name in ("other", "saved", "checkpoint", "new"):
        (upper / name).write_text("of rank 1")
    (upper / "equal").write_text("equal")
    (upper / "cache.rank1.index").write_text("of rank 1")
    (upper / "__pycache__").mkdir()
    (upper / "__pycache__" / "a.pyc").write_text("of rank 1")
    (folder / "order-1").write_text("of the next attempt")
    return folder


def kept(files: Path, real: Path) -> list[str]:
    folder = Path(f"{files}/rank-1{real}")
    return sorted(path.name for path in folder.iterdir())


def test_files_that_differ_are_kept(files: Path, real: Path) -> None:
    said = _clear(str(files), 0, ["0", "1"], ended_well=True)
    assert kept(files, real) == ["new", "other"]
    assert said is not None
    assert f"{real}/other" in said
    assert str(files) in said
    assert sorted(path.name for path in files.iterdir()) == ["order-1", "rank-1"]


def test_after_a_failure_only_files_that_the_chief_lacks_are_kept(
    files: Path, real: Path
) -> None:
    _clear(str(files), 0, ["0", "1"], ended_well=False)
    assert kept(files, real) == ["new"]


def test_another_attempt_keeps_its_layers(files: Path) -> None:
    assert _clear(str(files), 1, ["1"], ended_well=True) is None
    assert (files / "1-0.layers").exists()
    assert not (files / "order-1").exists()


def test_ranks_of_another_agent_keep_their_layers(files: Path) -> None:
    assert _clear(str(files), 0, ["0", "2"], ended_well=True) is None
    assert (files / "1-0.layers").exists()
