"""Tests of status, logs and stop, during a launch and after it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from tests.kit import machine
from tests.kit.cluster import COMMAND, Cluster, Running, plain
from tests.kit.json_formats import assert_format
from tests.kit.oracle import assert_nothing_left
from tests.kit.terminal import Terminal
from tests.kit.time_limits import allow_s
from tests.kit.waiting import eventually

UP = "echo up; until [ -e meeting ]; do sleep 0.02; done; echo down"
# `stop --now` that waits only one second before it kills the launcher.
IMPATIENT_STOP = """
import os, sys
from tfcluster.commands.stop import stop
print(stop(sys.argv[1], now=True, environ=os.environ, say=print, patience_s=1).state)
"""
DEAF = "trap '' TERM INT; echo up; while :; do sleep 0.1; done"


def detach(cluster: Cluster, script: str, *options: str, count: int = 1) -> Running:
    """Start a launch with --detach and wait until the command returns."""
    words = [*plain("-d", *options, count=count), "--", "bash", "-c", script]
    running = cluster.start(*words)
    code, seconds = running.end_timed()
    assert (code, seconds < allow_s(3)) == (0, True), running.err
    running.adopt(running.out.strip())
    return running


def wait_until_over(running: Running) -> None:
    eventually(lambda: running.found("end"), lambda: running.err, 40)


def test_detach_returns_at_once_and_goes_on(cluster: Cluster) -> None:
    running = detach(cluster, UP, count=2)
    assert cluster.run_ids() == [running.run]
    assert "hi" not in running.err
    eventually(lambda: "up" in running.text("worker:1"), str, 40)
    eventually(lambda: running.found("state", state="running"), str, 40)
    status = running.status()
    assert status["state"] == "running"
    assert {task["state"] for task in status["tasks"]} == {"running"}
    (cluster.folder / "meeting").touch()
    wait_until_over(running)
    assert running.status()["exit_code"] == 0
    assert_nothing_left(running)


def test_a_detached_run_outlives_its_terminal(cluster: Cluster) -> None:
    terminal = Terminal(read=False)
    words = [*plain("-d", count=1), "--", "bash", "-c", UP]
    running = terminal.launch(cluster, *words)
    assert running.end() == 0
    terminal.hang_up()
    (cluster.folder / "meeting").touch()
    wait_until_over(running)
    assert running.status()["exit_code"] == 0
    assert_nothing_left(running)


def test_what_keeps_a_detached_run_from_beginning_is_reported(cluster: Cluster) -> None:
    first = detach(cluster, UP, "--name", "digits")
    second = cluster.start(*plain("-d", "--name", "digits", count=1), "--", "true")
    assert second.end() == 7
    assert f"the run {first.run} already uses the name 'digits'" in second.err
    assert second.out == ""
    assert cluster.command("stop", "digits").returncode == 0
    assert_nothing_left(first)


def test_stop_ends_a_run_from_another_shell(cluster: Cluster) -> None:
    running = detach(cluster, UP, count=2)
    eventually(lambda: running.found("state", state="running"), str, 40)
    done = cluster.command("stop", running.run)
    assert done.returncode == 0, done.stderr
    assert f"{running.run}: stopped" in done.stderr
    status = running.status()
    assert (status["state"], status["exit_code"]) == ("stopped", 143)
    assert_nothing_left(running)


def assert_killed_at_once(running: Running) -> None:
    notes = [event["text"] for event in running.found("note")]
    assert "killing all tasks now" in notes
    assert not [text for text in notes if "(grace)" in text]


def test_stop_waits_for_the_grace_and_stop_now_does_not(cluster: Cluster) -> None:
    running = cluster.bash(DEAF, "--set", "grace=2s").up()
    began = time.monotonic()
    assert cluster.command("stop").returncode == 0
    assert 1.9 < time.monotonic() - began < allow_s(20)
    assert running.end() == 143
    assert_nothing_left(running)
    running = cluster.bash(DEAF, "--set", "grace=20s").up()
    assert cluster.command("stop", "--now").returncode == 0
    assert running.end() == 143
    assert_killed_at_once(running)
    assert_nothing_left(running)


def test_stop_now_hurries_a_stop_that_is_under_way(cluster: Cluster) -> None:
    running = cluster.bash(DEAF, "--set", "grace=20s").up()
    gentle = subprocess.Popen(
        [*COMMAND, "stop", running.run],
        env=cluster.environ,
        cwd=cluster.folder,
        stderr=subprocess.DEVNULL,
    )
    running.wait_for("state", state="stopping")
    assert cluster.command("stop", "--now", running.run).returncode == 0
    assert gentle.wait(5) == 0
    assert running.end(5) == 143
    assert_killed_at_once(running)
    assert_nothing_left(running)


@pytest.mark.slow
def test_many_stops_at_once_are_one(cluster: Cluster) -> None:
    script = "trap 'echo TERM; sleep 1; exit 0' TERM; echo up; while :; do :; done"
    running = cluster.bash(script, "--set", "grace=20s").up()
    stops = [
        subprocess.Popen(
            [*COMMAND, "stop", running.run],
            env=cluster.environ,
            cwd=cluster.folder,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(4)
    ]
    assert [stop.wait(20) for stop in stops] == [0] * 4
    assert running.end() == 143
    # A second signal would have killed the task before it finished.
    assert running.report()["tasks"][0]["exit_code"] == 0
    assert_nothing_left(running)


def test_a_stop_that_was_killed_is_in_nobodys_way(cluster: Cluster) -> None:
    running = cluster.bash(DEAF, "--set", "grace=20s").up()
    gentle = subprocess.Popen(
        [*COMMAND, "stop", running.run], env=cluster.environ, cwd=cluster.folder
    )
    running.wait_for("state", state="stopping")
    gentle.kill()
    gentle.wait()
    (running.folder / "stop").touch()  # as earlier versions did
    began = time.monotonic()
    assert cluster.command("stop", "--now", running.run).returncode == 0
    assert time.monotonic() - began < allow_s(15)
    assert running.end(5) == 143
    assert_nothing_left(running)


def test_a_launcher_that_was_stopped_can_be_told_to_stop(cluster: Cluster) -> None:
    running = cluster.bash(UP).up()
    running.signal(signal.SIGSTOP)
    assert cluster.command("stop", running.run).returncode == 0
    assert running.end(5) == 143
    assert_nothing_left(running)


@pytest.mark.slow
def test_a_launcher_that_does_not_react_is_killed(cluster: Cluster) -> None:
    running = cluster.bash(DEAF, "--set", "grace=60s").up()
    with machine.frozen(running.process.pid):
        done = subprocess.run(
            [sys.executable, "-c", IMPATIENT_STOP, running.run],
            env=cluster.environ,
            capture_output=True,
            text=True,
            timeout=40,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert not machine.carrying(f"TFCLUSTER_RUN={running.run}")
    first, *_, last = done.stdout.splitlines()
    assert "does not respond" in first
    assert last == "lost"
    assert running.end() == -signal.SIGKILL
    assert_nothing_left(running, report=False)


def test_stop_needs_no_room_in_the_state_folder(cluster: Cluster) -> None:
    with machine.few_files(cluster.state, 40):
        running = cluster.bash(UP).up()
        with suppress(OSError):
            for number in range(50):
                (cluster.state / f"filler-{number}").touch()
        assert cluster.command("stop", running.run).returncode == 0
        assert running.end() == 143


def test_stop_of_what_is_over_or_unknown(cluster: Cluster) -> None:
    nothing = cluster.command("stop")
    assert nothing.returncode == 2
    assert "no runs yet" in nothing.stderr
    running = cluster.bash("true")
    assert running.end() == 0
    over = cluster.command("stop", running.run)
    assert over.returncode == 0
    assert "has already ended (succeeded)" in over.stderr
    unknown = cluster.command("stop", "nobody")
    assert unknown.returncode == 2
    assert "no such run" in unknown.stderr
    assert "Traceback" not in unknown.stderr


def test_status_of_all_runs_and_of_one(cluster: Cluster) -> None:
    first = cluster.bash("exit 33", "--name", "first")
    assert first.end() == 33
    second = cluster.bash(UP, "--name", "second").up()
    second.wait_for("state", state="running")
    answer = json.loads(cluster.command("status", "--json").stdout)
    assert_format("status-all", answer)
    listed = answer["runs"]
    assert [(run["run"], run["state"]) for run in listed] == [
        (second.run, "running"),
        (first.run, "failed"),
    ]
    text = cluster.command("status").stdout
    assert text.index(second.run) < text.index(first.run)
    assert "failed (exit code 33)" in text
    by_name = cluster.command("status", "first").stdout
    assert "exited with code 33" in by_name
    (cluster.folder / "meeting").touch()
    assert second.end() == 0


def test_status_answers_while_the_launcher_is_stopped(cluster: Cluster) -> None:
    running = cluster.bash(UP).up()
    running.wait_for("state", state="running")
    running.signal(signal.SIGSTOP)
    began = time.monotonic()
    assert running.status()["state"] == "running"
    assert time.monotonic() - began < allow_s(10)
    running.signal(signal.SIGCONT)
    (cluster.folder / "meeting").touch()
    assert running.end() == 0


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_watching_a_run_ends_with_it(cluster: Cluster, form: list[str]) -> None:
    running = cluster.bash(UP).up()
    watching = subprocess.Popen(
        [*COMMAND, "status", "--watch", *form, running.run],
        env=cluster.environ,
        cwd=cluster.folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    first = watching.stdout.readline()
    assert running.run in first
    (cluster.folder / "meeting").touch()
    assert running.end() == 0
    rest, _ = watching.communicate(timeout=10)
    assert watching.returncode == 0
    assert "succeeded" in rest
    if form:
        states = [json.loads(line)["state"] for line in [first, *rest.splitlines()]]
        assert states[-1] == "succeeded"


def test_logs_by_run_and_task(cluster: Cluster) -> None:
    script = "for i in 1 2 3; do echo $TFCLUSTER_TASK $i; done"
    running = cluster.bash(script, count=2)
    assert running.end() == 0
    assert cluster.command("logs").stdout.splitlines() == [
        f"worker:{index} | worker:{index} {number}"
        for index in (0, 1)
        for number in (1, 2, 3)
    ]
    assert cluster.command("logs", running.run, "worker:1", "-n", "1").stdout == (
        "worker:1 3\n"
    )
    unknown = cluster.command("logs", "ps:0")
    assert unknown.returncode == 2
    assert "no such task" in unknown.stderr


def test_logs_follow_until_the_run_is_over(cluster: Cluster) -> None:
    running = cluster.bash(UP, count=2).up(count=2)
    following = subprocess.Popen(
        [*COMMAND, "logs", "-f"],
        env=cluster.environ,
        cwd=cluster.folder,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert following.stdout is not None
    first = [following.stdout.readline() for _ in range(2)]
    assert sorted(first) == ["worker:0 | up\n", "worker:1 | up\n"]
    (cluster.folder / "meeting").touch()
    rest, _ = following.communicate(timeout=10)
    assert following.returncode == 0
    assert sorted(rest.splitlines()) == ["worker:0 | down", "worker:1 | down"]
    assert running.end() == 0


@pytest.mark.parametrize("command", [["logs", "-f"], ["status", "--watch"]])
def test_ctrl_c_ends_watching_without_a_word(
    cluster: Cluster, command: list[str]
) -> None:
    running = cluster.bash(UP).up()
    watching = subprocess.Popen(
        [*COMMAND, *command],
        env=cluster.environ,
        cwd=cluster.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout is not None
    watching.stdout.readline()
    os.kill(watching.pid, signal.SIGINT)
    _, said = watching.communicate(timeout=10)
    # The command only ends the line on which the terminal shows ^C.
    assert (watching.returncode, said) == (130, "\n")
    assert running.process.poll() is None
    (cluster.folder / "meeting").touch()
    assert running.end() == 0


@pytest.mark.parametrize("command", [["logs", "-n", "100000"], ["status", "--json"]])
def test_a_reader_that_leaves_ends_a_command_in_silence(
    cluster: Cluster, command: list[str]
) -> None:
    running = cluster.bash("for i in {1..20000}; do echo line $i; done")
    assert running.end() == 0
    reading = subprocess.Popen(
        [*COMMAND, *command],
        env=cluster.environ,
        cwd=cluster.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert reading.stdout is not None
    reading.stdout.readline()
    reading.stdout.close()
    _, said = reading.communicate(timeout=10)
    assert said == ""
