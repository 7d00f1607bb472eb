"""The files of what tasks record: bounded, the newest lines kept."""

from __future__ import annotations

import json
from pathlib import Path

from tfcluster.base.task_id import TaskId
from tfcluster.launcher.task_files import TraceFiles
from tfcluster.protocol.task_events import TraceMessage
from tfcluster.record.paths import RunPaths

TASK = TaskId("worker", 1)


def _numbers(path: Path) -> list[int]:
    return [json.loads(line)["first"] for line in path.read_bytes().splitlines()]


def test_lines_have_what_is_known_of_the_task(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    files = TraceFiles(paths)
    files.add(TASK, 2, "h1", TraceMessage(3, 4, 5, ("step",), "[]"))
    assert files.close(10.0) is None
    assert json.loads(paths.trace(TASK).read_bytes()) == {
        "attempt": 2,
        "host": "h1",
        "first": 3,
        "last": 4,
        "base_us": 5,
        "names": ["step"],
        "events": "[]",
    }
    assert paths.trace(TASK).stat().st_mode & 0o777 == 0o600
    assert paths.trace(TASK).parent.stat().st_mode & 0o777 == 0o700


def test_a_full_file_becomes_the_older_one(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    files = TraceFiles(paths, limit_bytes=900)
    for number in range(40):
        files.add(TASK, 0, "h1", TraceMessage(number, number, 0, (), ""))
    files.close(10.0)
    both = [paths.older_trace(TASK), paths.trace(TASK)]
    assert all(path.stat().st_size <= 900 for path in both)
    numbers = _numbers(both[0]) + _numbers(both[1])
    assert numbers == list(range(numbers[0], 40))
    assert len(numbers) > 10


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text("")
    files = TraceFiles(RunPaths(tmp_path))
    files.add(TASK, 0, "h1", TraceMessage(0, 0, 0, (), ""))
    assert "trace" in (files.close(10.0) or "")


def test_without_a_batch_there_is_no_folder(tmp_path: Path) -> None:
    files = TraceFiles(RunPaths(tmp_path))
    files.close(10.0)
    assert list(tmp_path.iterdir()) == []
