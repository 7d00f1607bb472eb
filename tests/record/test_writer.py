"""Tests that events and progress reach the disk complete, or are kept and counted."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.record.programs import BEGIN_RUN, WRITE_WITHOUT_END, line_of, program
from tfcluster.record import events as writer_module
from tfcluster.record.events import (
    EventReader,
    Writer,
    decode,
    encode,
    read_ends,
    read_events,
)
from tfcluster.record.files import read_json, replace_json
from tfcluster.record.paths import RunPaths, create_run

NOW_S = 1795169700.0


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return create_run(tmp_path, "digits", NOW_S)


def _notes(paths: RunPaths) -> list[str]:
    return [event["text"] for event in read_events(paths.events)]


# --- lines ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "a\nb\r\u2028", "ä€\U0001f600", "\udcff", "\0\x1b"]
)
def test_an_event_is_one_line_whatever_it_holds(text: str) -> None:
    event: dict[str, Any] = {"t": 1.5, "type": "note", "text": text}
    line = encode(event)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode([line]) == [event]


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b"1", b'{"t":1}', b'{"type":"x"}', b'{"t":"1","type":"x"}',
     b"\xff\xfe", b"[" * 100_000, b'{"t":1,"type":5}'],
)  # fmt: skip
def test_what_is_no_event_is_passed_over(line: bytes) -> None:
    good = encode({"t": 1, "type": "note"})
    assert decode([good, line, good]) == [{"t": 1, "type": "note"}] * 2


def test_a_torn_last_line_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = encode({"t": 1, "type": "a"})
    torn = encode({"t": 2, "type": "b"})
    for cut in range(len(torn)):
        path.write_bytes(whole + torn[:cut])
        reader = EventReader(path)
        assert [event["type"] for event in reader.read()] == ["a"]
        with path.open("ab") as file:
            file.write(torn[cut:])
        assert [event["type"] for event in reader.read()] == ["b"]
        assert reader.read() == []


def test_no_file_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "none") == []
    assert read_ends(tmp_path / "none") == []


@pytest.mark.parametrize("count", [0, 1, 2, 5000])
def test_the_ends_are_the_first_event_and_the_last_ones(
    count: int, tmp_path: Path
) -> None:
    path = tmp_path / "events.jsonl"
    events = [{"t": i, "type": "note", "text": "x" * 50} for i in range(count)]
    path.write_bytes(b"".join(map(encode, events)) + b'{"torn":')
    ends = read_ends(path)
    assert ends[:1] == events[:1]
    assert ends[1:] == events[len(events) - len(ends) + 1 :]
    assert len(ends) == count or 500 < len(ends) < 1500


# --- the writer ----------------------------------------------------------------------


def test_events_come_back_in_order_with_their_times(paths: RunPaths) -> None:
    ticks = iter(range(1000))
    writer = Writer(paths, clock=lambda: float(next(ticks)))
    given = [writer.append({"type": "note", "text": str(i)}) for i in range(100)]
    assert writer.close(5)
    assert read_events(paths.events) == given
    assert given[7] == {"t": 7.0, "type": "note", "text": "7"}


def test_many_threads_may_append(paths: RunPaths) -> None:
    writer = Writer(paths)

    def append(name: str) -> None:
        for i in range(300):
            writer.append({"type": "note", "text": f"{name}{i}"})

    threads = [threading.Thread(target=append, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.close(5)
    assert sorted(_notes(paths)) == sorted(
        f"{n}{i}" for n in "abcd" for i in range(300)
    )


def test_only_the_latest_progress_is_kept(paths: RunPaths) -> None:
    writer = Writer(paths, clock=lambda: NOW_S)
    for step in range(500):
        writer.progress({"worker:0": {"step": step}})
    assert writer.close(5)
    assert read_json(paths.progress) == {
        "t": NOW_S,
        "tasks": {"worker:0": {"step": 499}},
    }
    left = {path.name for path in paths.root.iterdir()}
    assert left == {"events.jsonl", "progress.json", "logs"}


def test_a_line_that_a_dead_writer_tore_spoils_no_other(paths: RunPaths) -> None:
    paths.events.write_bytes(encode({"t": 1, "type": "note", "text": "a"}) + b'{"t":2,')
    writer = Writer(paths)
    writer.append({"type": "note", "text": "b"})
    assert writer.close(5)
    assert _notes(paths) == ["a", "b"]


def test_after_close_events_are_counted_as_lost(paths: RunPaths) -> None:
    writer = Writer(paths)
    assert writer.close(5)
    writer.append({"type": "note", "text": "late"})
    assert writer.lost == 1
    assert _notes(paths) == []


def test_a_removed_folder_disturbs_nobody(paths: RunPaths) -> None:
    writer = Writer(paths)
    shutil.rmtree(paths.root)
    writer.append({"type": "note", "text": "into the void"})
    writer.progress({})
    assert not writer.flush(5)
    assert "No such file" in (writer.trouble or "")
    writer.append({"type": "end", "state": "failed", "exit_code": 1})
    writer.close(5)


def test_a_file_size_limit_is_survived_and_nothing_is_torn(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that was only partly done is completed as soon as there is room."""
    monkeypatch.setattr(writer_module, "_RETRY_S", 0.02)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = Writer(paths)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        for i in range(100):
            writer.append({"type": "note", "text": f"{i}"})
        assert not writer.flush(5)
        assert writer.trouble
        assert 10 < len(read_events(paths.events)) < 100
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert writer.close(5)
    assert _notes(paths) == [str(i) for i in range(100)]


# --- a disk that is full -------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small disk")
    place = tmp_path / "disk"
    place.mkdir()
    options = "size=64k,mode=700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 4096)


def test_a_full_disk_stops_nobody_and_the_gap_is_reported(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_RETRY_S", 0.02)
    monkeypatch.setattr(writer_module, "_WAITING_BYTES", 20_000)
    paths = create_run(small_disk, "digits", NOW_S)
    filler = small_disk / "filler"
    writer = Writer(paths)
    writer.append({"type": "note", "text": "first"})
    assert writer.flush(5)
    _fill(filler)
    # First fill the rest of the events file's last page: from then on no byte can be
    # written, and no smaller event fits in between.
    writer.append({"type": "note", "text": "y" * 5000})
    assert not writer.flush(5)
    for i in range(1000):
        writer.append({"type": "note", "text": f"{i:0100}"})
    writer.progress({"worker:0": {"step": 1}})
    assert not writer.flush(5)
    assert "No space left" in (writer.trouble or "")
    lost = writer.lost
    assert 500 < lost < 1000
    reason = "x" * 5000
    writer.append({"type": "end", "state": "failed", "reason": reason})  # always kept
    filler.unlink()
    assert not writer.close(5)  # some events were lost
    events = read_events(paths.events)
    kept = [
        e["text"] for e in events[1:] if e["type"] == "note" and len(e["text"]) == 100
    ]
    assert kept == [f"{i:0100}" for i in range(1000 - lost)]
    assert f"{lost} events could not be recorded" in [e.get("text") for e in events]
    assert "end" in [event["type"] for event in events]


def test_a_full_disk_leaves_the_old_file(small_disk: Path) -> None:
    path = small_disk / "plan.json"
    replace_json(path, {"old": True})
    with pytest.raises(OSError, match="space"):
        replace_json(path, {"new": "x" * 100_000})
    assert read_json(path) == {"old": True}
    assert [file.name for file in small_disk.iterdir()] == ["plan.json"]


# --- JSON files ----------------------------------------------------------------------


def test_a_replaced_file_is_private_and_a_leftover_is_no_obstacle(
    tmp_path: Path,
) -> None:
    path = tmp_path / "plan.json"
    (tmp_path / ".plan.json.new").write_text("of a writer that was killed")
    replace_json(path, {"a": 1})
    assert read_json(path) == {"a": 1}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_not_there(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert read_json(path) is None
    assert read_json(tmp_path) is None
    assert read_json(tmp_path / "none") is None


# --- kill -9 -------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_kill_at_any_time_leaves_every_file_readable(tmp_path: Path) -> None:
    """A reader that looks all the time never sees a partial file or a missing event."""
    trials = int(os.environ.get("TFCLUSTER_CHAOS_TRIALS", "10"))
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # noqa: T201 - to repeat a failure
    dice = random.Random(seed)
    for trial in range(trials):
        paths = create_run(tmp_path, "digits", NOW_S + trial)
        with program(BEGIN_RUN + WRITE_WITHOUT_END, paths.root) as launcher:
            assert line_of(launcher) == "begun"
            looks = dice.randrange(1, 40)
            for _ in range(looks):
                _read_strictly(paths)
            os.kill(launcher.pid, 9)
            launcher.wait()
            _read_strictly(paths)


def _read_strictly(paths: RunPaths) -> None:
    for path in (paths.plan, paths.progress, paths.lock):
        if path.exists():
            assert isinstance(json.loads(path.read_bytes()), dict), path
    data = paths.events.read_bytes()
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    numbers = [json.loads(line).get("number") for line in lines][1:]
    assert numbers == list(range(1, len(numbers) + 1))
