"""What is remembered of files that have come back."""

from __future__ import annotations

from pathlib import Path

from tfcluster.record.fetched import Copy, FetchedFiles
from tfcluster.record.paths import RunPaths

COPY = Copy(5, 2000, 5, 2000, "digest")


def test_what_has_come_survives_a_killed_process(tmp_path: Path) -> None:
    killed = FetchedFiles(RunPaths(tmp_path), save_s=0.0)
    killed.put("a", COPY)
    assert FetchedFiles(RunPaths(tmp_path)).get("a") == COPY


def test_two_fetches_at_once_forget_nothing(tmp_path: Path) -> None:
    one, two = FetchedFiles(RunPaths(tmp_path)), FetchedFiles(RunPaths(tmp_path))
    one.put("a", COPY)
    two.put("b", COPY)
    one.save()
    two.save()
    both = FetchedFiles(RunPaths(tmp_path))
    assert (both.get("a"), both.get("b")) == (COPY, COPY)
