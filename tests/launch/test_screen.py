"""Tests of what a user sees of a launch, on a terminal and in a file."""

from __future__ import annotations

import signal

import pytest

from tests.kit.cluster import Cluster, plain
from tests.kit.oracle import assert_nothing_left
from tests.kit.terminal import CTRL_C, Terminal

UP = "echo up; until [ -e meeting ]; do sleep 0.02; done"


def test_the_run_id_comes_first_and_the_table_last(cluster: Cluster) -> None:
    terminal = Terminal()
    script = "echo hello; [ $TFCLUSTER_RANK = 1 ] && sleep 0.1 && exit 33; sleep 60"
    running = terminal.launch(cluster, *plain(count=3), "--", "bash", "-c", script)
    assert running.end() == 33
    terminal.close()
    rows = terminal.rows()
    assert rows[0] == f"run {running.run}"
    table = next(i for i, row in enumerate(rows) if row.startswith("task  "))
    assert rows[table + 1].startswith("worker:0  localhost  stopped ")
    assert rows[table + 2].startswith("worker:1  localhost  failed, exit 33 ")
    assert rows[table + 2].endswith("<- first failure")
    assert rows[table + 4 :][0].startswith("first failure: worker:1 on localhost")
    assert sum(row.startswith("worker:0 | hello") for row in rows) == 1
    # The live text was erased completely.
    assert not any(row.startswith(("running", "waiting", "stopping")) for row in rows)


def test_the_live_text_names_what_is_awaited(cluster: Cluster) -> None:
    terminal = Terminal()
    running = terminal.launch(cluster, *plain(count=2), "--", "bash", "-c", UP)
    terminal.wait_for("running 0:0")
    (cluster.folder / "meeting").touch()
    assert running.end() == 0
    terminal.close()


@pytest.mark.tensorflow
def test_the_live_text_names_an_import_that_is_awaited(cluster: Cluster) -> None:
    terminal = Terminal()
    (cluster.folder / "train.py").write_text("import tensorflow as tf\n")
    words = ["-n", "2", "--set", "runtime.strategy=none", "--", "python", "train.py"]
    running = terminal.launch(cluster, *words)
    terminal.wait_for("waiting for 2 of 2 tasks: worker:[0-1] importing tensorflow")
    terminal.press(CTRL_C)
    assert running.end() == 130
    terminal.close()
    assert_nothing_left(running)


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (40, 10), (20, 5)])
def test_live_text_fits_any_terminal(
    cluster: Cluster, columns: int, lines: int
) -> None:
    terminal = Terminal(columns, lines)
    wait = "trap 'exit 0' INT; sleep 60 & echo up; wait"
    running = terminal.launch(cluster, *plain(count=12), "--", "bash", "-c", wait)
    terminal.wait_for("running 0:0")
    terminal.press(CTRL_C)
    terminal.wait_for("interrupted")
    assert running.end() == 130
    terminal.close()
    rows = terminal.rows()
    # If a live line had wrapped, its first part would still be there.
    assert not any(row.startswith(("running", "waiting", "stopping ")) for row in rows)
    assert sum(row.startswith("worker:0   ") for row in rows) == 1


def test_no_color_is_honoured(cluster: Cluster) -> None:
    script = "echo up; sleep 0.3; exit 33"
    terminal = Terminal()
    words = [*plain(count=1), "--", "bash", "-c", script]
    running = terminal.launch(cluster, *words, NO_COLOR="1")
    assert running.end() == 33
    terminal.close()
    assert "\x1b[3" not in terminal.text
    assert "\x1b[1m" not in terminal.text
    colourful = Terminal()
    running = colourful.launch(cluster, *words)
    assert running.end() == 33
    colourful.close()
    assert "\x1b[31m" in colourful.text


def test_without_a_terminal_there_are_plain_lines(cluster: Cluster) -> None:
    running = cluster.bash("echo hello; sleep 0.5; exit 33", count=2)
    assert running.end() == 33
    assert "\x1b" not in running.out + running.err
    assert "\r" not in running.out + running.err
    assert running.err.startswith(f"run {running.run}\n")
    assert "task      host       end               time" in running.err


def test_a_long_stop_says_for_whom_it_waits(cluster: Cluster) -> None:
    terminal = Terminal()
    script = "trap '' TERM; echo up; while :; do sleep 0.1; done"
    running = terminal.launch(cluster, *plain(count=2), "--", "bash", "-c", script)
    running.up(count=2)
    running.signal(signal.SIGTERM)
    terminal.wait_for("stopping 1 s: waiting for worker:[0-1]")
    running.signal(signal.SIGTERM)
    assert running.end() == 143
    terminal.close()
    assert_nothing_left(running)
