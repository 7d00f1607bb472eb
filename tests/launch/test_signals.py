"""Tests of signals to the launcher, as terminals, shells and schedulers send them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.kit import machine
from tests.kit.cluster import PYTHON, Cluster, Running, plain
from tests.kit.oracle import assert_nothing_left
from tests.kit.terminal import CTRL_C, Terminal
from tests.kit.time_limits import allow_s
from tests.kit.waiting import eventually

# Parent and child print the signals they receive; with DEAF they do not exit.
LISTENER = """
import os, signal, sys, time
name = 'parent' if os.fork() else 'child'
def say(word):
    os.write(1, f'{name} {word}\\n'.encode())  # whole lines, whoever else writes
def on_signal(number, frame):
    say(signal.Signals(number).name)
    if not os.environ.get('DEAF'):
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, on_signal)
say('up')
while True:
    time.sleep(1)
"""
TASKS = ("worker:0", "worker:1")


def listener(*options: str) -> list[str]:
    return [*plain(*options, count=2), "--", *PYTHON, "-c", LISTENER]


DEAF = ("--set", "env.DEAF=1")


def wait_until_up(running: Running) -> None:
    for name in ("parent up", "child up"):
        running.wait_for_text(name, *TASKS)


def assert_told_once(running: Running, name: str) -> None:
    for task in TASKS:
        told = [line for line in running.text(task).splitlines() if "up" not in line]
        assert sorted(told) == [f"child {name}", f"parent {name}"]


def test_ctrl_c_stops_all_tasks_gently(cluster: Cluster) -> None:
    terminal = Terminal()
    running = terminal.launch(cluster, *listener())
    wait_until_up(running)
    terminal.press(CTRL_C)
    assert running.end() == 130
    terminal.close()
    assert "press Ctrl-C again to kill them" in terminal.text
    assert_told_once(running, "SIGINT")
    report = running.report()
    assert (report["state"], report["exit_code"]) == ("stopped", 130)
    assert report["first_failure"] is None
    assert_nothing_left(running)


def test_ctrl_c_twice_kills(cluster: Cluster) -> None:
    terminal = Terminal()
    running = terminal.launch(cluster, *listener(*DEAF))
    wait_until_up(running)
    terminal.press(CTRL_C)
    running.wait_for_text("SIGINT", *TASKS)
    terminal.press(CTRL_C)
    code, seconds = running.end_timed()
    assert (code, seconds < allow_s(2)) == (130, True)
    terminal.close()
    assert "killing all tasks now" in terminal.text
    assert_told_once(running, "SIGINT")
    assert_nothing_left(running)


def test_ctrl_c_three_times_leaves(cluster: Cluster) -> None:
    terminal = Terminal()
    running = terminal.launch(cluster, *listener(*DEAF))
    wait_until_up(running)
    guard, agent = machine.agent_of(running.process.pid)
    # Only an agent that does not respond makes a third Ctrl-C necessary.
    os.kill(agent, signal.SIGSTOP)
    for word in ("interrupted", "killing all tasks now", "exiting now"):
        terminal.press(CTRL_C)
        terminal.wait_for(word)
    code, seconds = running.end_timed()
    assert (code, seconds < allow_s(3)) == (130, True)
    terminal.close()
    assert "may still be running: worker:0, worker:1" in terminal.text
    # The stopped agent was killed too, and its guard has cleaned up.
    eventually(
        lambda: not machine.is_alive(agent) and not machine.is_alive(guard),
        lambda: "the agent outlives its launcher",
        20,
    )
    assert_nothing_left(running)


def test_sigterm_stops_all_tasks_gently(cluster: Cluster) -> None:
    running = cluster.start(*listener())
    wait_until_up(running)
    running.signal(signal.SIGTERM)
    assert running.end() == 143
    assert_told_once(running, "SIGTERM")
    assert "stop requested" in running.err
    report = running.report()
    assert (report["state"], report["exit_code"]) == ("stopped", 143)
    assert_nothing_left(running)


def test_a_signal_that_timeout_sends_twice_counts_once(cluster: Cluster) -> None:
    running = cluster.start(*listener())
    wait_until_up(running)
    running.signal(signal.SIGTERM)
    running.signal(signal.SIGTERM)
    assert running.end() == 143
    assert_told_once(running, "SIGTERM")
    assert "killing all tasks now" not in running.err
    assert_nothing_left(running)


def test_a_warning_of_the_time_limit_reaches_handlers(cluster: Cluster) -> None:
    code = LISTENER.replace("(signal.SIGTERM,", "(signal.SIGUSR1, signal.SIGTERM,")
    running = cluster.start(*plain(count=2), "--", *PYTHON, "-c", code)
    wait_until_up(running)
    running.signal(signal.SIGUSR1)
    assert running.end() == 124
    assert_told_once(running, "SIGUSR1")
    assert_nothing_left(running)


def run_exists(running: Running) -> bool:
    return bool(running.cluster.run_ids())


def event(type_: str, **keys: object) -> Callable[[Running], bool]:
    def happened(running: Running) -> bool:
        if not run_exists(running):
            return False
        running.adopt(running.cluster.run_ids()[0])
        return bool(running.found(type_, **keys))

    return happened


PHASES = {
    "folder": run_exists,
    "begun": event("run"),
    "starting": event("state", state="starting"),
    "host ready": event("host", state="ready"),
    "task starting": event("task", state="starting"),
    "task running": event("task", state="running"),
    "running": event("state", state="running"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_in_any_phase_is_143(cluster: Cluster, phase: str) -> None:
    running = cluster.start(*listener())
    eventually(lambda: PHASES[phase](running), lambda: phase, 40)
    running.signal(signal.SIGTERM)
    assert running.end() == 143, running.err
    assert running.report()["state"] == "stopped"
    assert_nothing_left(running)


def test_sigterm_during_the_stop_of_a_failed_run_kills(cluster: Cluster) -> None:
    script = (
        "trap '' TERM; [ $TFCLUSTER_RANK = 0 ] && exit 33; while :; do sleep 1; done"
    )
    running = cluster.bash(script, count=2)
    running.wait_for("state", state="stopping")
    running.signal(signal.SIGTERM)
    code, seconds = running.end_timed()
    assert (code, seconds < allow_s(2)) == (33, True)
    assert running.report()["first_failure"]["task"] == "worker:0"
    assert_nothing_left(running)


def test_a_terminal_that_hangs_up_is_129(cluster: Cluster) -> None:
    terminal = Terminal(read=False)
    running = terminal.launch(cluster, *listener())
    wait_until_up(running)
    terminal.hang_up()
    assert running.end() == 129
    assert_told_once(running, "SIGTERM")
    assert running.report()["exit_code"] == 129
    assert_nothing_left(running)


def test_nohup_is_respected(cluster: Cluster) -> None:
    script = "echo up; until [ -e meeting ]; do sleep 0.02; done"
    words = [*plain(count=1), "--", "bash", "-c", script]
    running = cluster.start(
        *words, prepare=lambda: void(signal.signal(signal.SIGHUP, signal.SIG_IGN))
    ).up()
    running.signal(signal.SIGHUP)
    (cluster.folder / "meeting").touch()
    assert running.end() == 0
    assert_nothing_left(running)


def void(_: object) -> None:
    """Ignore the result of a call made for its effect."""


@pytest.mark.parametrize("code", [0, 33])
def test_a_reader_that_leaves_is_survived(cluster: Cluster, code: int) -> None:
    script = (
        f"for i in {{1..2000}}; do echo line $i; done; sleep 0.3; echo x; exit {code}"
    )
    words = [*plain(count=2), "--", "bash", "-c", script]
    running = cluster.start(*words, stdout=subprocess.PIPE)
    assert running.process.stdout is not None
    assert b"line 1\n" in running.process.stdout.readline()
    running.process.stdout.close()
    assert running.end() == code
    assert "Traceback" not in running.err
    assert "Exception" not in running.err
    assert running.text("worker:0").splitlines()[-2:] == ["line 2000", "x"]
    assert_nothing_left(running)


def test_closed_standard_streams_are_survived(cluster: Cluster) -> None:
    def close_all() -> None:
        for descriptor in (0, 1, 2):
            os.close(descriptor)

    words = [*plain(count=1), "--", "bash", "-c", "echo hello; exit 33"]
    running = cluster.start(*words, prepare=close_all)
    assert running.end() == 33
    running.adopt(cluster.run_ids()[0])
    assert running.text("worker:0") == "hello\n"
    assert_nothing_left(running)


@pytest.mark.slow
def test_a_terminal_that_nobody_reads_holds_up_nobody(cluster: Cluster) -> None:
    terminal = Terminal(read=False)
    script = "for i in {1..20000}; do echo a line of a program $i; done; echo done"
    running = terminal.launch(cluster, *plain(count=2), "--", "bash", "-c", script)
    began = time.monotonic()
    for task in TASKS:
        running.wait_for("task", task=task, state="succeeded")
    assert time.monotonic() - began < allow_s(30)
    # The launcher waits only briefly for a terminal that nobody reads.
    assert running.end(12) == 0
    terminal.close()
    assert len(running.text("worker:0").splitlines()) == 20_001
    assert_nothing_left(running)
