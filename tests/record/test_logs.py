"""Tests of reading the last lines of logs and of following them, whatever they hold."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.kit.time_limits import allow_s
from tfcluster.record.logs import LINE_BYTES, follow, last_lines


@pytest.mark.parametrize(
    ("content", "count", "expected"),
    [
        (b"", 5, []),
        (b"a\nb\nc\n", 2, ["b", "c"]),
        (b"a\nb\nc", 2, ["b", "c"]),
        (b"a\nb\n", 9, ["a", "b"]),
        (b"\n\n\n", 2, ["", ""]),
        (b"a\n", 0, []),
        (b"\xff\n", 1, ["\udcff"]),
        ("ä€\n".encode(), 1, ["ä€"]),
        (b"a\r\n", 1, ["a\r"]),
    ],
)
def test_last_lines(
    content: bytes, count: int, expected: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    assert last_lines(path, count) == expected


def test_last_lines_of_a_long_file_are_found_from_the_end(tmp_path: Path) -> None:
    path = tmp_path / "log"
    lines = [f"line {i} " + "x" * (i % 300) for i in range(20_000)]
    path.write_text("\n".join(lines) + "\n")
    for count in (1, 100, 5000):
        assert last_lines(path, count) == lines[-count:]


def test_a_line_of_100_mb_costs_neither_memory_nor_time(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.write(b"before\n")
        file.truncate(100 << 20)  # a hole: 100 MB of NUL without a newline
        file.seek(0, os.SEEK_END)
        file.write(b"\nafter\n")
    began_s = time.process_time()
    long, after = last_lines(path, 3)
    assert time.process_time() - began_s < allow_s(2)
    assert after == "after"
    assert long.startswith("…")
    assert len(long) == LINE_BYTES + 1


def test_a_long_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * (3 * LINE_BYTES) + b"\nafter\n")
    long, after = last_lines(path, 2)
    assert long == "x" * LINE_BYTES + "…"
    assert after == "after"


def test_last_lines_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        last_lines(tmp_path / "none", 1)


# --- following -----------------------------------------------------------------------


class _Follower:
    """Follows the files in a thread, like ``logs -f``."""

    def __init__(self, paths: Mapping[str, Path], last: int = 10) -> None:
        self.seen: list[tuple[str, str]] = []
        self._stop = threading.Event()
        self._came = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, args=(paths, last), daemon=True
        )
        self._thread.start()

    def _run(self, paths: Mapping[str, Path], last: int) -> None:
        for label, lines in follow(paths, self._stop, last=last):
            with self._came:
                self.seen += [(label, line) for line in lines]
                self._came.notify_all()

    def wait(self, done: Callable[[list[str]], bool]) -> list[str]:
        with self._came:
            ok = self._came.wait_for(lambda: done([line for _, line in self.seen]), 10)
            assert ok, self.seen[-5:]
            return [line for _, line in self.seen]

    def stop(self) -> list[str]:
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()
        return [line for _, line in self.seen]


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_lines_come_as_they_are_written(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"1\n2\n3\nun")
    follower = _Follower({"A": a, "B": b}, last=2)
    follower.wait(lambda seen: seen == ["2", "3"])
    _append(a, b"finished\n")
    follower.wait(lambda seen: seen[2:] == ["unfinished"])
    _append(b, b"late\nfile\n")  # a new file is shown from its start
    follower.wait(lambda seen: seen[3:] == ["late", "file"])
    _append(b, b"no end")
    assert follower.stop()[-1] == "no end"
    assert [label for label, _ in follower.seen] == ["A"] * 3 + ["B"] * 3


def test_all_that_was_written_before_the_stop_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    follower = _Follower({"A": path})
    lines = [f"{i} " + "x" * 200 for i in range(30_000)]
    _append(path, "".join(line + "\n" for line in lines).encode())
    assert follower.stop() == lines


def test_a_long_line_is_cut_and_its_rest_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    follower = _Follower({"A": path})
    for _ in range(5):
        _append(path, b"x" * LINE_BYTES)
    _append(path, b"\nafter\n")
    lines = follower.wait(lambda seen: seen[-1:] == ["after"])
    assert [len(line) for line in lines] == [LINE_BYTES + 1, 5]
    follower.stop()


class _OverAtOnce:
    """The run writes a log and is over while the log is waited for."""

    def __init__(self, path: Path, content: bytes) -> None:
        self._path = path
        self._content = content

    def wait(self, timeout: float | None = None) -> bool:
        self._path.write_bytes(self._content)
        return True


@pytest.mark.parametrize("last", [None, 0, 5])
@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"a\nb\n", ["a", "b"]), (b"a\nb", ["a", "b"]), (b"a", ["a"])],
)
def test_a_log_that_appears_when_the_run_is_over_is_whole(
    last: int | None, content: bytes, expected: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "log"
    found = follow({"w": path}, _OverAtOnce(path, content), last=last)
    assert [line for _, lines in found for line in lines] == expected


def test_a_line_that_is_not_finished_when_the_run_is_over(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"a\nb\nc")
    over = threading.Event()
    over.set()
    found = follow({"w": path}, over, last=1)
    assert [line for _, lines in found for line in lines] == ["b", "c"]
