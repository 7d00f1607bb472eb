"""Kept interpreters: what launches take, what they refuse, and who survives whom."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from tests.launch import machine
from tests.launch.cluster import Cluster
from tests.launch.kept import (
    CONFIG,
    Keeper,
    assert_only_kept_is_left,
    marks,
    processes_of,
)
from tests.launch.test_deaths import is_dead, kill

TOOK = "localhost: took a kept interpreter with TensorFlow 2.21.0, Keras 3.15.0 (pid "


@pytest.fixture
def keeper(cluster: Cluster) -> Iterator[Keeper]:
    keeper = Keeper(cluster)
    yield keeper
    keeper.stop()


def test_a_launch_takes_it_and_says_so(keeper: Keeper) -> None:
    kept = keeper.keep()
    running = keeper.launch()
    assert f"{TOOK}{kept})" in running.err
    assert [e for e in running.found("note") if e["text"] == f"{TOOK}{kept})"]
    assert running.text("worker:0") == "up 1 True\n"
    found = processes_of(running, kept)
    tasks = [
        running.wait_for("task", state="running", task=f"worker:{n}")["pid"]
        for n in (0, 1)
    ]
    assert {machine.parent(pid) for pid in tasks} == {found["agent"]}
    agent_mark = f"TFCLUSTER_RUN={running.run}".encode()
    for pid in (*tasks, found["server"]):
        assert agent_mark in machine.environ(pid)
        assert marks(pid) == {
            b"TFCLUSTER_RUN",
            b"TFCLUSTER_AGENT",
            b"TFCLUSTER_STATE_DIR",
        }
    assert marks(kept) == {b"TFCLUSTER_KEPT", b"TFCLUSTER_STATE_DIR"}
    assert keeper.finish(running) == 0
    assert_only_kept_is_left(running, kept)
    (listed,) = keeper.listed()
    assert (listed["pid"], listed["uses"]) == (kept, 1)


PARTS = ("kept", "server", "first guard", "guard", "first agent", "agent")
DECISIVE = {"first agent", "agent"}
"""A run ends with either of these; all others can be missed."""
USUAL = [
    ("kept",),
    ("server", "guard"),
    ("agent",),
    ("first agent", "kept"),
    ("agent", "guard", "first agent", "first guard"),
]
OTHERS = [
    chosen
    for count in range(1, len(PARTS) + 1)
    for chosen in itertools.combinations(PARTS, count)
    if set(chosen) not in map(set, USUAL)
]


@pytest.mark.parametrize(
    "victims",
    [
        *USUAL,
        *(pytest.param(chosen, marks=pytest.mark.slow) for chosen in OTHERS),
    ],
    ids=", ".join,
)
def test_whoever_is_killed_nothing_is_left_of_the_run(
    keeper: Keeper, victims: Sequence[str]
) -> None:
    kept = keeper.keep()
    running = keeper.launch()
    found = processes_of(running, kept)
    kill(*(found[victim] for victim in victims))
    spared = None if "kept" in victims else kept
    if DECISIVE & set(victims):
        assert running.end() == 5, running.err
        assert running.report()["state"] == "failed"
    else:
        for victim in victims:
            machine.eventually(partial(is_dead, found[victim]), lambda: "alive", 10)
        assert running.process.poll() is None
        if {"guard", "first guard"} & set(victims):
            running.wait_for_err("the guard process died")
        assert keeper.finish(running) == 0, running.err
    assert_only_kept_is_left(running, spared)


@pytest.mark.parametrize(
    "victims",
    [(), ("kept",), ("guard", "first guard"), ("agent", "first agent")],
    ids=lambda victims: ", ".join(victims) or "none",
)
def test_nothing_is_left_when_the_launcher_is_killed(
    keeper: Keeper, victims: Sequence[str]
) -> None:
    kept = keeper.keep()
    running = keeper.launch()
    found = processes_of(running, kept)
    kill(found["launcher"], *(found[victim] for victim in victims))
    assert running.end() == -signal.SIGKILL
    assert_only_kept_is_left(running, None if "kept" in victims else kept)


def test_stop_sweeps_what_was_forked_from_a_kept_interpreter(keeper: Keeper) -> None:
    kept = keeper.keep()
    running = keeper.launch()
    found = processes_of(running, kept)
    kill(*(pid for part, pid in found.items() if part not in ("kept", "server")))
    assert running.end() == -signal.SIGKILL
    assert machine.carrying(f"TFCLUSTER_RUN={running.run}")
    done = keeper.cluster.command("stop", running.run)
    assert done.returncode == 0, done.stderr
    assert_only_kept_is_left(running, kept)


def test_two_runs_share_it_and_end_apart(keeper: Keeper) -> None:
    kept = keeper.keep()
    first, second = keeper.launch(), keeper.launch()
    assert f"{TOOK}{kept})" in second.err
    first.signal(signal.SIGTERM)
    assert first.end() == 143
    assert second.process.poll() is None
    assert keeper.cluster.command("clean", "--older-than", "0s").returncode == 0
    assert keeper.cluster.command("stop", second.run).returncode == 0
    assert second.end() == 143
    assert_only_kept_is_left(second, kept)


def test_it_is_ended_while_its_tasks_run(keeper: Keeper) -> None:
    kept = keeper.keep()
    running = keeper.launch()
    keeper.stop()
    machine.eventually(partial(is_dead, kept), lambda: "alive", 10)
    assert keeper.listed() == []
    assert keeper.finish(running) == 0
    assert_only_kept_is_left(running, None)


def test_a_restarted_task_is_forked_again(keeper: Keeper) -> None:
    kept = keeper.keep()
    running = keeper.launch("--set", "restart.max=1", "--set", "restart.scope=task")
    pid = running.wait_for("task", state="running", task="worker:0")["pid"]
    os.kill(pid, signal.SIGKILL)
    again = running.wait_for("task", state="running", task="worker:0", attempt=1)
    assert machine.parent(again["pid"]) == processes_of(running, kept)["agent"]
    assert keeper.finish(running) == 0
    assert_only_kept_is_left(running, kept)


def test_an_environment_that_differs_is_named_and_the_launch_starts_its_own(
    keeper: Keeper,
) -> None:
    kept = keeper.keep()
    keeper.cluster.environ["OMP_NUM_THREADS"] = "3"
    running = keeper.launch()
    assert (
        f"localhost: the kept interpreter with pid {kept} is not used: it was started "
        "without OMP_NUM_THREADS, this is with OMP_NUM_THREADS='3'\n" in running.err
    )
    assert TOOK not in running.err
    assert keeper.finish(running) == 0
    assert_only_kept_is_left(running, kept)


def test_one_whose_packages_have_changed_ends(keeper: Keeper) -> None:
    kept = keeper.keep()
    (keeper.packages / "numpy-2.9.dist-info").mkdir()
    running = keeper.launch()
    assert (
        f"localhost: the kept interpreter with pid {kept} is not used: the packages in "
        f"{keeper.packages} have changed since it was started; it ends now\n"
        in running.err
    )
    assert keeper.finish(running) == 0
    assert_only_kept_is_left(running, None)
    assert keeper.listed() == []


def test_it_ends_by_itself_and_a_second_command_renews_it(keeper: Keeper) -> None:
    kept = keeper.keep("--keep", "1h")
    assert keeper.keep("--keep", "2h") == kept
    (listed,) = keeper.listed()
    assert 3600 < listed["ends_in_s"] <= 7200
    done = keeper.cluster.command("warm", keeper.config, "--keep", "10ms")
    assert f"pid {kept} still keeps TensorFlow 2.21.0" in done.stdout
    machine.eventually(partial(is_dead, kept), lambda: "alive", 20)
    assert not list((keeper.cluster.state / "warm").iterdir())


def test_setup_lines_are_run_for_it_and_then_for_the_launch(keeper: Keeper) -> None:
    keeper.config = keeper.cluster.file(
        CONFIG + "setup: ['export OMP_NUM_THREADS=5']\n"
    )
    kept = keeper.keep()
    running = keeper.launch()
    assert f"{TOOK}{kept})" in running.err
    assert keeper.finish(running) == 0
    other = keeper.cluster.file(
        CONFIG + "setup: ['export OMP_NUM_THREADS=6']\n", "other.yaml"
    )
    keeper.config = other
    running = keeper.launch()
    reason = "it was started with OMP_NUM_THREADS='5', this is with OMP_NUM_THREADS='6'"
    assert f"pid {kept} is not used: {reason}" in running.err
    assert keeper.finish(running) == 0
    assert_only_kept_is_left(running, kept)


def test_list_shows_it_and_stop_ends_only_those_of_a_file(keeper: Keeper) -> None:
    kept = keeper.keep()
    told = keeper.cluster.command("warm", "--list").stdout.splitlines()
    words = "host pid age ends in imported memory used kept for"
    assert " ".join(told[0].split()) == words
    assert str(kept) in told[1]
    assert "tensorflow 2.21.0, keras 3.15.0" in told[1]
    assert told[1].endswith(f"never  {keeper.config}")
    other = keeper.cluster.file(CONFIG, "other.yaml")
    assert keeper.cluster.command("warm", "--list", other).stdout == ""
    done = keeper.cluster.command("warm", "--stop", other)
    assert (done.returncode, done.stderr) == (0, "nothing was kept\n")
    assert machine.is_alive(kept)
    done = keeper.cluster.command("warm", "--stop", keeper.config)
    assert (done.returncode, done.stdout) == (0, f"localhost: pid {kept} ends\n")
    machine.eventually(partial(is_dead, kept), lambda: "alive", 10)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "which cluster.yaml?"),
        (("--list", "--stop"), 2, "cannot be combined with --list"),
        (("c.yaml", "--keep", "soon"), 2, "'soon' is not a duration of at most 7d"),
        (("c.yaml", "--keep", "8d"), 2, "'8d' is not a duration of at most 7d"),
        (
            ("c.yaml", "--set", "backend=slurm"),
            2,
            "interpreters cannot be kept on hosts of backend slurm: they belong to a "
            "job, and everything ends with it",
        ),
        (
            ("c.yaml", "--set", "runtime.warm_start=false"),
            2,
            "no task of it would be forked from a warm interpreter",
        ),
        (
            ("c.yaml", "--set", "python=/no/python"),
            4,
            "there is no program '/no/python'",
        ),
        (
            ("c.yaml", "--set", "env.PYTHONPATH=lib"),
            4,
            "PYTHONPATH contains a relative folder",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(
    cluster: Cluster, words: Sequence[str], code: int, said: str
) -> None:
    cluster.file(CONFIG, "c.yaml")
    (cluster.folder / "train.py").write_text("import tensorflow\n")
    done = cluster.command("warm", *words)
    assert done.returncode == code, done.stderr
    assert said in done.stderr


def test_a_failed_import_is_shown(keeper: Keeper) -> None:
    (keeper.packages / "keras" / "__init__.py").write_text("raise OSError('no disk')\n")
    done = keeper.cluster.command("warm", keeper.config)
    assert done.returncode == 4
    assert "localhost: error: it has ended during the import" in done.stderr
    assert "OSError: no disk" in done.stderr
    assert keeper.listed() == []


def test_one_that_does_not_answer_delays_a_launch_only_a_little(
    keeper: Keeper,
) -> None:
    kept = keeper.keep()
    os.kill(kept, signal.SIGSTOP)
    try:
        running = keeper.launch()
        assert TOOK not in running.err
        assert keeper.finish(running) == 0
    finally:
        os.kill(kept, signal.SIGCONT)
    assert_only_kept_is_left(running, kept)


OTHER_USER = """
import os, socket, sys
folder = os.open(sys.argv[1], os.O_RDONLY)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
end = socket.socket(socket.AF_UNIX)
end.connect(f"/proc/self/fd/{folder}/{sys.argv[2]}")
try:
    end.sendall(b'{"type":"end"}\\n')
    print(end.recv(1000) or "closed")
except ConnectionError:
    print("closed")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user: needs root")
def test_another_user_is_not_heard(keeper: Keeper) -> None:
    kept = keeper.keep()
    (path,) = (keeper.cluster.state / "warm").glob("*.sock")
    assert (path.parent.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (
        0o700,
        0o600,
    )
    # Even if somebody has opened folder and socket to others.
    path.parent.chmod(0o777)
    path.chmod(0o777)
    argv = [sys.executable, "-c", OTHER_USER, str(path.parent), path.name]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
        assert done.stdout == "closed\n", done.stderr
    finally:
        path.parent.chmod(0o700)
    assert machine.is_alive(kept)
    assert len(keeper.listed()) == 1
