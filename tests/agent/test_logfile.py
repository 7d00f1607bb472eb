from __future__ import annotations

import os
from pathlib import Path

from tfcluster.agent.output_capture import LogFile


def test_a_file_that_was_renamed_loses_nothing(tmp_path: Path) -> None:
    log = LogFile(str(tmp_path / "a.log"))
    log.write(b"one\n", 0.0)
    (tmp_path / "a.log").rename(tmp_path / "a.log.1")
    log.write(b"two\n", 5.0)
    assert (tmp_path / "a.log.1").read_bytes() == b"one\n"
    assert (tmp_path / "a.log").read_bytes() == b"two\n"
    assert (log.cause, log.dropped_bytes) == (None, 0)


def test_it_is_tried_again_only_every_few_seconds(tmp_path: Path) -> None:
    (tmp_path / "folder").touch()
    log = LogFile(str(tmp_path / "folder" / "a.log"))
    log.write(b"12345", 0.0)
    assert log.changes[-1] == (log.cause, 5)
    (tmp_path / "folder").unlink()
    log.write(b"678", 1.0)
    assert log.dropped_bytes == 8
    log.write(b"here\n", 2.5)
    assert log.changes[-1] == (None, 8)
    content = (tmp_path / "folder" / "a.log").read_bytes()
    assert content == b"\n---- 8 bytes are missing here ----\nhere\n"


def test_a_header_stands_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    for text in (b"no end", b"ended\n", b""):
        path.write_bytes(text)
        log = LogFile(str(path))
        log.write_header("-- x", 0.0)
        log.close(0.0)
        between = b"\n" if text and not text.endswith(b"\n") else b""
        assert path.read_bytes() == text + between + b"-- x\n"


def test_a_removed_file_is_noticed_when_nothing_is_written(tmp_path: Path) -> None:
    log = LogFile(str(tmp_path / "a.log"))
    log.write(b"gone", 0.0)
    os.unlink(tmp_path / "a.log")  # noqa: PTH108 - what the user does
    log.tick(1.5)
    assert log.dropped_bytes == 4
    log.tick(1.6)
    assert [lost for _, lost in log.changes] == [4, 4]
    assert "removed" in str(log.changes[0][0])
    assert log.changes[1][0] is None
    assert (tmp_path / "a.log").exists()
