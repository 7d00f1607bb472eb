"""Tests of task output: complete in the files, safe and bounded on the console."""

from __future__ import annotations

import hashlib
import itertools
import re
from pathlib import Path

import pytest

from tests.kit import machine
from tests.kit.cluster import PYTHON, Cluster, plain
from tests.kit.oracle import assert_nothing_left
from tests.kit.terminal import Terminal, shown
from tests.kit.time_limits import allow_s

# Writes a known pattern at a known rate, and then its digest to a file.
FLOOD = """
import hashlib, os, time
digest = hashlib.sha256()
rank = os.environ['TFCLUSTER_RANK']
began = time.monotonic()
written = number = 0
while written < 50_000_000:
    block = b''.join(b'%s %08d %s\\n' % (rank.encode(), number + i, b'x' * 88)
                     for i in range(2500))
    number += 2500
    digest.update(block)
    view = memoryview(block)
    while view:
        view = view[os.write(1, view):]
    written += len(block)
    time.sleep(max(0, began + written / 25_000_000 - time.monotonic()))
with open(os.environ['MEETING'] + rank, 'w') as file:
    file.write(digest.hexdigest())
"""


@pytest.mark.timeout(120)
def test_a_flood_is_whole_in_the_files_and_small_in_memory(cluster: Cluster) -> None:
    meeting = f"env.MEETING={cluster.folder}/digest"
    running = cluster.python(FLOOD, "--set", meeting, count=4)
    running.wait_for("state", state="running")
    peak = 0
    beats = []
    while running.process.poll() is None:
        try:
            peak = max(peak, machine.peak_memory_kib(running.process.pid))
        except (AssertionError, OSError):
            break
        try:
            beats.append((running.folder / "progress.json").stat().st_mtime)
        except FileNotFoundError:
            continue
    assert running.end(60) == 0
    for index in range(4):
        wanted = (cluster.folder / f"digest{index}").read_text()
        assert sha256(running.log(f"worker:{index}")) == wanted
    assert peak < 200 << 10
    assert max(b - a for a, b in itertools.pairwise(beats)) < allow_s(4)
    assert not running.found("host", state="lost")
    assert "not shown, see" in running.out
    assert_nothing_left(running)


def test_a_line_of_100_mb_is_whole_in_the_file(cluster: Cluster) -> None:
    code = """
import os
block = b'0123456789' * 100_000
for _ in range(100):
    view = memoryview(block)
    while view:
        view = view[os.write(1, view):]
print()
print('after', flush=True)
"""
    running = cluster.python(code)
    assert running.end() == 0
    log = running.log("worker:0")
    assert log.stat().st_size == 100_000_000 + len("\nafter\n")
    wanted = hashlib.sha256(b"0123456789" * 10_000_000 + b"\nafter\n").hexdigest()
    assert sha256(log) == wanted
    first, *rest = running.out.splitlines()
    assert first.startswith("worker:0 | 0123456789")
    assert len(first) < 17_000
    assert rest[-1] == "worker:0 | after"
    assert_nothing_left(running)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


EVIL = [
    b"\x1b]0;owned\x07title",
    b"\x1b]52;c;ZXZpbA==\x07clipboard",
    b"\x1b[2J\x1b[Hcleared",
    b"\x1bP1;1|evil\x1b\\dcs",
    b"\xc2\x9b31mc1",
    b"\x00nul\x07bell\x08back\x7fdel",
    "\u202eright to left".encode(),
    b"\xff\xfe\xfanot utf-8",
    b"over\rworker:1 | forged",
    b"line\x0bworker:1 | forged\x0cworker:1 | forged",
    b"next\xc2\x85worker:1 | forged",
    "sep\u2028worker:1 | forged".encode(),
]


# Control characters except tab and line feed, separators, text direction marks, and
# what is not text.
UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\udc80-\udcff]"
)


def test_what_a_program_prints_cannot_steer_or_forge(cluster: Cluster) -> None:
    evil = cluster.folder / "evil"
    data = b"\n".join(EVIL) + b"\n"
    evil.write_bytes(data)
    script = f"cat {evil}; echo worker:1 '|' forged"
    running = cluster.bash(script, count=1)
    assert running.end() == 0
    assert running.log("worker:0").read_bytes() == data + b"worker:1 | forged\n"
    out = running.out
    assert not UNSAFE.search(out)
    for line in out.split("\n")[:-1]:
        assert line.startswith("worker:0 | ")
    assert "not utf-8" in out
    again = cluster.command("logs", "-n", "100").stdout
    assert not UNSAFE.search(again)
    assert_nothing_left(running)


def test_a_failing_program_cannot_steer_through_its_last_words(
    cluster: Cluster,
) -> None:
    script = r"printf '\033]0;owned\007\033[2Jlast\nError: \033[31mred\n'; exit 33"
    running = cluster.bash(script)
    assert running.end() == 33
    for text in (
        running.out,
        running.err,
        cluster.command("status").stdout,
        cluster.command("logs").stdout,
    ):
        assert "\x1b" not in text
        assert "\x07" not in text
    assert "last" in running.err


def test_progress_bars_do_not_flood(cluster: Cluster) -> None:
    code = """
import sys, time
for step in range(2000):
    sys.stdout.write(f'\\r{step}/2000 [=====]')
    sys.stdout.flush()
    time.sleep(0.0005)
print('\\ntrained', flush=True)
"""
    running = cluster.python(code)
    assert running.end() == 0
    lines = running.out.splitlines()
    assert lines[-1] == "worker:0 | trained"
    assert "worker:0 | 1999/2000 [=====]" in lines
    assert len(lines) < 20
    assert running.text("worker:0").count("\r") == 2000
    assert_nothing_left(running)


def test_output_without_an_end_of_line_is_shown(cluster: Cluster) -> None:
    running = cluster.bash("printf unfinished")
    assert running.end() == 0
    assert running.out == "worker:0 | unfinished\n"
    assert running.text("worker:0") == "unfinished"


def test_standard_error_is_logged_in_its_place(cluster: Cluster) -> None:
    running = cluster.bash("echo one; echo two >&2; echo three")
    assert running.end() == 0
    assert running.text("worker:0") == "one\ntwo\nthree\n"
    assert running.out.splitlines() == [
        "worker:0 | one",
        "worker:0 | two",
        "worker:0 | three",
    ]


def test_tasks_read_nothing_from_the_terminal(cluster: Cluster) -> None:
    terminal = Terminal()
    script = "read line && echo got $line; echo done; [ -t 0 ] && echo terminal; true"
    running = terminal.launch(cluster, *plain(count=1), "--", "bash", "-c", script)
    assert running.end() == 0
    terminal.close()
    assert running.text("worker:0") == "done\n"


def test_a_flood_on_a_terminal_is_bounded(cluster: Cluster) -> None:
    terminal = Terminal()
    code = "import os\nfor i in range(200_000): os.write(1, b'line %d\\n' % i)"
    running = terminal.launch(cluster, *plain(count=1), "--", *PYTHON, "-c", code)
    assert running.end() == 0
    terminal.close()
    assert len(running.text("worker:0").splitlines()) == 200_000
    rows = [row for row in shown(terminal.text, 80) if row.startswith("worker:0 |")]
    assert len(rows) < 50_000
    assert any("not shown" in row for row in rows)
    assert_nothing_left(running)
