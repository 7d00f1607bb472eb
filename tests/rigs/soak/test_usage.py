"""Tests of the rules that tell growing usage from flat usage."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.rigs.soak import usage
from tests.rigs.soak.usage import MiB, Sample


def samples(whose: str, what: str, values: Sequence[float]) -> list[Sample]:
    return [Sample(60.0 * n, {(whose, what): v}) for n, v in enumerate(values)]


@pytest.mark.parametrize(
    ("whose", "what", "first", "last", "flat"),
    [
        ("agents", "memory", 40 * MiB, 59 * MiB, True),
        ("agents", "memory", 40 * MiB, 61 * MiB, False),
        ("ranks", "memory", 1000 * MiB, 1115 * MiB, True),
        ("launcher", "open files", 30, 34, True),
        ("launcher", "open files", 30, 35, False),
        ("launcher", "threads", 9, 14, False),
        ("cache", "size", 3 * MiB, 4 * MiB, True),
        ("cache", "size", 3 * MiB, 5 * MiB, False),
    ],
)
def test_rules(whose: str, what: str, first: float, last: float, flat: bool) -> None:
    values = [first, first + (last - first) / 2, last]
    (row,) = usage.rows(samples(whose, what, values))
    assert (row.first, row.last, row.flat) == (first, last, flat)


def test_the_record_may_grow_slowly() -> None:
    slow = [n * usage.RECORD_PER_MINUTE for n in range(20)]
    assert usage.rows(samples("record", "size", slow))[0].flat
    fast = [2 * each for each in slow]
    assert not usage.rows(samples("record", "size", fast))[0].flat


def test_a_single_odd_sample_does_not_count() -> None:
    values = [10.0] * 100
    values[3] = values[95] = 1000.0
    (row,) = usage.rows(samples("agents", "threads", values))
    assert (row.first, row.last, row.flat) == (10.0, 10.0, True)


def test_this_process_and_folder_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_bytes(bytes(1000))
    pids, files = {"ranks": [os.getpid()]}, {"cache": tmp_path}
    monkeypatch.setattr(usage, "OLD_S", 0.0)
    found = usage.sample(pids, files).values
    assert found["cache", "size"] == 1000
    assert found["ranks", "memory"] > MiB
    assert found["ranks", "open files"] >= 3
    monkeypatch.setattr(usage, "OLD_S", time.time())
    assert set(usage.sample(pids, files).values) == {("cache", "size")}


def test_the_table_marks_what_grows() -> None:
    found = usage.rows(samples("launcher", "threads", [9, 9, 90]))
    assert usage.table(found)[1].split() == ["launcher", "threads", "9", "90", "GROWS"]
