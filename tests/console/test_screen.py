"""Tests of the screen on real terminals and pipes, most of them slow or closed."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import resource
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest

from tests.kit.time_limits import allow_s
from tfcluster.base.isolated_import import PACKAGE_ROOT
from tfcluster.console import screen as screen_module
from tfcluster.console.screen import Screen, Stream

DEADLINE_S = 30.0


class Terminal:
    """A real terminal that is read only when a test asks for it."""

    def __init__(self, columns: int = 80, lines: int = 24) -> None:
        self._ours, theirs = pty.openpty()
        attributes = termios.tcgetattr(theirs)
        attributes[1] &= ~termios.ONLCR  # leave newlines as written
        termios.tcsetattr(theirs, termios.TCSANOW, attributes)
        self.file: TextIO = os.fdopen(theirs, "w")
        self.text = ""
        self.resize(columns, lines)

    def resize(self, columns: int, lines: int = 24) -> None:
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, size)

    def read_until(self, done: Callable[[str], bool]) -> str:
        """Read until the text so far satisfies ``done``; returns that text."""
        until_s = time.monotonic() + DEADLINE_S
        while not done(self.text):
            left_s = until_s - time.monotonic()
            ready, _, _ = select.select([self._ours], [], [], max(0.0, left_s))
            assert ready, f"not seen in time; so far: {self.text[-2000:]!r}"
            self.text += os.read(self._ours, 1 << 16).decode()
        return self.text

    def rows(self, columns: int = 80) -> list[str]:
        """Return the rows that a terminal with ``columns`` columns shows."""
        return _shown(self.text, columns)

    def hang_up(self) -> None:
        os.close(self._ours)
        self._ours = -1

    def close(self) -> None:
        if self._ours >= 0:
            os.close(self._ours)
        self.file.close()


def _shown(text: str, columns: int) -> list[str]:
    """Emulate a minimal terminal: wraps, moves up, erases."""
    rows, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|.|\n|\r", text):
        if token == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif token == "\r":
            column = 0
        elif token == "\x1b[K":
            rows[row] = rows[row][:column]
        elif token == "\x1b[A":
            row -= 1
        elif not token.startswith("\x1b"):
            if column == columns:
                row, column = row + 1, 0
                rows += [""] * (row + 1 - len(rows))
            rows[row] = (
                rows[row][:column].ljust(column) + token + rows[row][column + 1 :]
            )
            column += 1
        else:
            assert token.endswith("m"), token
    return rows


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


@contextmanager
def _screen(
    out: TextIO | None,
    err: TextIO | None,
    *,
    tasks: Sequence[str] = (),
    **environ: str,
) -> Iterator[Screen]:
    environ = {"TERM": "xterm", "NO_COLOR": "1", **environ}
    screen = Screen(out, err, environ=environ, tasks=tasks)
    try:
        yield screen
    finally:
        screen.close(0.0)


def _closed(screen: Screen) -> None:
    assert screen.close(DEADLINE_S)


# --- in order ------------------------------------------------------------------------


def test_logs_go_to_stdout_and_talk_to_stderr() -> None:
    out, err = io.StringIO(), io.StringIO()
    with _screen(out, err, tasks=["worker:0", "ps:0"]) as screen:
        screen.log("worker:0", ["one", "two"])
        screen.log("ps:0", ["three"], skipped=1234)
        screen.say("hello")
        screen.error(["error: broken", "  hint: mend it"])
        screen.show(["a table"])
        _closed(screen)
    assert out.getvalue() == (
        "worker:0 | one\nworker:0 | two\n"
        "ps:0     | … 1,234 lines not shown, see its log file\nps:0     | three\n"
    )
    assert err.getvalue() == "hello\nerror: broken\n  hint: mend it\na table\n"


def test_nothing_that_is_said_steers_the_terminal_or_forges_a_prefix() -> None:
    out, err = io.StringIO(), io.StringIO()
    with _screen(out, err) as screen:
        screen.log(
            "worker:0", ["\x1b[2Jx\nworker:1 | forged\r\n", "1%\r99%\r", "\udcff"]
        )
        screen.log("\x1b]0;t\x07", ["x"])
        screen.say("from \x1b[31mhost\x1b[2J")
        screen.error(["error: \x9b2J"])
        screen.live("never drawn \x1b[2J")
        _closed(screen)
    assert out.getvalue() == (
        "worker:0 | \\x1b[2Jx\nworker:0 | worker:1 | forged\n"
        "worker:0 | 99%\nworker:0 | \\xff\n\\x1b]0;t\\x07 | x\n"
    )
    assert err.getvalue() == "from host\\x1b[2J\nerror: \\x9b2J\n"


def test_a_very_long_line_is_cut() -> None:
    out = io.StringIO()
    with _screen(out, None) as screen:
        screen.log("ps:0", ["\x00" * 20_000])
        _closed(screen)
    assert len(out.getvalue()) < 20_000
    assert out.getvalue().endswith("…\n")


def test_a_stream_that_cannot_spell_it_gets_escapes(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("w", encoding="ascii") as out, _screen(out, None) as screen:
        screen.log("ps:0", ["ä€"])
        _closed(screen)
    assert path.read_text() == "ps:0 | \\xe4\\u20ac\n"


def test_both_streams_in_one_file_keep_their_order(tmp_path: Path) -> None:
    path = tmp_path / "both"
    with path.open("a") as out, path.open("a") as err, _screen(out, err) as screen:
        for i in range(200):
            screen.log("ps:0", [str(i)])
            screen.say(str(i))
        _closed(screen)
    expected = [line for i in range(200) for line in (f"ps:0 | {i}", str(i))]
    assert path.read_text().splitlines() == expected


def test_what_was_printed_before_comes_before(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("w") as out:
        out.write("before\n")  # still in the file's buffer
        with _screen(out, None) as screen:
            screen.log("ps:0", ["after"])
            _closed(screen)
    assert path.read_text() == "before\nps:0 | after\n"


# --- the live text -------------------------------------------------------------------


def test_live_text_stays_below_and_vanishes_at_the_end(terminal: Terminal) -> None:
    with _screen(terminal.file, terminal.file) as screen:
        screen.live("waiting")
        terminal.read_until(lambda text: "waiting" in text)
        screen.log("ps:0", ["line 1"])
        terminal.read_until(lambda text: text.count("waiting") == 2)
        assert terminal.rows() == ["ps:0 | line 1", "waiting"]
        screen.live("two\nlines")
        terminal.read_until(lambda text: "lines" in text)
        screen.say("talk")
        terminal.read_until(lambda text: text.count("lines") == 2)
        assert terminal.rows() == ["ps:0 | line 1", "talk", "two", "lines"]
        screen.live(None)
        screen.error(["error: x"])
        _closed(screen)
        terminal.read_until(lambda text: text.endswith("error: x\n"))
    assert [row for row in terminal.rows() if row] == [
        "ps:0 | line 1",
        "talk",
        "error: x",
    ]


def test_live_text_is_cut_to_the_terminal_and_follows_its_size(
    terminal: Terminal,
) -> None:
    terminal.resize(30)
    with _screen(terminal.file, terminal.file) as screen:
        screen.live("abcdefghij" * 10)
        terminal.read_until(lambda text: "…" in text)
        assert terminal.rows() == [("abcdefghij" * 3)[:28] + "…"]
        terminal.resize(20)
        screen.live("abcdefghij" * 9)
        terminal.read_until(lambda text: text.count("…") == 2)
        # The old text took two rows of the narrower terminal; both were erased.
        assert terminal.text.count("\x1b[A\x1b[K") == 1
        assert terminal.text.rpartition("\x1b[K")[2] == ("abcdefghij" * 3)[:18] + "…"


def test_live_text_is_drawn_ten_times_a_second_at_most(terminal: Terminal) -> None:
    with _screen(terminal.file, terminal.file) as screen:
        began_s = time.monotonic()
        for i in range(2000):
            screen.live(f"step {i};")
            time.sleep(0.0002)
        screen.live("last")
        terminal.read_until(lambda text: "last" in text)
        took_s = time.monotonic() - began_s
    drawn = len(re.findall(r"step \d+;", terminal.text))
    assert 1 <= drawn <= took_s * 10 + 2


def test_many_live_lines_leave_room(terminal: Terminal) -> None:
    terminal.resize(80, lines=5)
    with _screen(terminal.file, terminal.file) as screen:
        screen.live("\n".join("abcdefgh"))
        terminal.read_until(lambda text: "d" in text)
    assert terminal.rows() == ["a", "b", "c", "d"]


def test_live_text_when_only_stderr_is_a_terminal(
    terminal: Terminal, tmp_path: Path
) -> None:
    path = tmp_path / "out"
    with path.open("w") as out, _screen(out, terminal.file) as screen:
        screen.live("waiting")
        screen.log("ps:0", ["x"])
        terminal.read_until(lambda text: "waiting" in text)
        _closed(screen)
    assert path.read_text() == "ps:0 | x\n"
    assert "x" not in terminal.text


def test_without_a_terminal_live_text_is_rare_and_only_news() -> None:
    now_s = 0.0
    err = io.StringIO()
    screen = Screen(None, err, environ={}, clock=lambda: now_s)
    for second in range(100):
        now_s = float(second)
        waits = "worker:1" if second < 50 else "a host"
        screen.live(f"waiting for {waits}, {second} s")
    screen.live(None)
    _closed(screen)
    assert err.getvalue() == "waiting for worker:1, 10 s\nwaiting for a host, 50 s\n"


def test_a_dumb_terminal_is_not_drawn_on(terminal: Terminal) -> None:
    with _screen(terminal.file, terminal.file, TERM="dumb", NO_COLOR="") as screen:
        screen.live("waiting")
        screen.log("ps:0", ["x"])
        screen.error(["error: y"])
        _closed(screen)
        terminal.read_until(lambda text: text.endswith("y\n"))
    assert terminal.text == "ps:0 | x\nerror: y\n"


def test_colours_unless_unwanted(terminal: Terminal) -> None:
    with _screen(terminal.file, terminal.file, NO_COLOR="") as screen:
        screen.log("worker:0", ["x"])
        screen.error(["error: y"])
        _closed(screen)
        terminal.read_until(lambda text: "y\n" in text)
    assert re.search(r"\x1b\[\d+mworker:0\x1b\[0m \| x\n", terminal.text)
    assert "\x1b[31merror:\x1b[0m y\n" in terminal.text


# --- when nobody reads ---------------------------------------------------------------


def test_a_terminal_that_nobody_reads_holds_up_nobody(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen_module, "MAX_LINES", 500)
    count, pad = 20_000, "x" * 300
    with _screen(terminal.file, terminal.file) as screen:
        began_s = time.monotonic()
        for i in range(count // 10):
            screen.live(f"step {i}")
            screen.log("ps:0", [f"line {i * 10 + j};{pad}" for j in range(10)])
        screen.say("talk is never dropped")
        assert time.monotonic() - began_s < allow_s(12)
        began_s = time.monotonic()
        assert not screen.close(0.2)
        assert time.monotonic() - began_s < allow_s(8)
        # When the terminal is read after all, only the lines that were counted are
        # missing.
        terminal.read_until(lambda text: "talk is never dropped\n" in text)
    told = [
        int(n.replace(",", "")) for n in re.findall(r"… ([\d,]+) line", terminal.text)
    ]
    shown = [int(n) for n in re.findall(r"line (\d+);", terminal.text)]
    assert told
    assert sum(told) + len(shown) == count
    assert shown == sorted(shown)


def test_memory_stays_bounded_whatever_the_lines_are(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen_module, "MAX_CHARACTERS", 1 << 20)
    with _screen(terminal.file, terminal.file) as screen:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(2000):
            screen.log("ps:0", ["x" * 100_000 + "!"])
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) / 1024 < 100


def test_a_pipe_whose_reader_has_gone_silences_the_logs_only(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    errors = tmp_path / "err"
    with (
        os.fdopen(writer, "w") as out,
        errors.open("w") as err,
        _screen(out, err) as screen,
    ):
        for i in range(100):
            screen.log("ps:0", [str(i)])
        screen.error(["error: still told"])
        _closed(screen)
    assert errors.read_text() == "error: still told\n"


def test_a_stdout_that_nobody_reads_does_not_hold_up_stderr(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    errors = tmp_path / "err"
    with (
        os.fdopen(writer, "w") as out,
        errors.open("w") as err,
        _screen(out, err) as screen,
    ):
        screen.log("ps:0", ["x" * 10_000] * 100)
        screen.error(["error: told at once"])
        assert not screen.close(0.5)
        assert errors.read_text() == "error: told at once\n"
        os.close(reader)  # ends the blocked write


def test_a_terminal_that_hangs_up_is_survived(terminal: Terminal) -> None:
    with _screen(terminal.file, terminal.file) as screen:
        screen.live("waiting")
        terminal.read_until(lambda text: "waiting" in text)
        terminal.hang_up()
        screen.log("ps:0", ["x"])
        screen.error(["error: y"])
        _closed(screen)


def test_a_stream_is_closed_when_nobody_reads_it(terminal: Terminal) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    terminal.hang_up()
    with os.fdopen(writer, "w") as pipe:
        for file in (pipe, terminal.file):
            stream = Stream(file, {})
            assert not stream.closed
            stream.write("x")
            assert stream.closed


def test_streams_that_were_closed_from_the_beginning() -> None:
    with _screen(None, None) as screen:
        screen.log("ps:0", ["x"])
        screen.say("y")
        screen.live("z")
        _closed(screen)
    screen.say("after the end")
    screen.log("ps:0", ["after the end"])


def test_a_terminal_that_somebody_made_non_blocking(terminal: Terminal) -> None:
    os.set_blocking(terminal.file.fileno(), False)
    with _screen(terminal.file, terminal.file) as screen:
        for i in range(5000):
            screen.log("ps:0", [f"line {i};"])
        terminal.read_until(lambda text: "line 4999;" in text)
        _closed(screen)
    assert len(re.findall(r"line \d+;", terminal.text)) == 5000


@pytest.mark.parametrize("closed", ["out", "tty"])
def test_a_program_ends_in_silence_when_its_terminal_is_gone(closed: str) -> None:
    """There is no traceback at exit, and the exit code is the program's own."""
    code = """
import os, sys
from tfcluster.console.screen import Screen
screen = Screen(sys.stdout, sys.stderr, environ=os.environ)
for i in range(2000):
    screen.log("worker:0", ["x" * 100])
screen.close(1.0)
sys.exit(7)
"""
    if closed == "out":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        reader, writer = pty.openpty()  # never read
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=writer,
        stderr=subprocess.PIPE,
        cwd=PACKAGE_ROOT,
    )
    os.close(writer)
    _, errors = process.communicate(timeout=30)
    if closed == "tty":
        os.close(reader)
    assert process.returncode == 7
    assert errors == b""
