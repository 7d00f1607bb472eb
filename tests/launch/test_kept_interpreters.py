"""Kept interpreters: what launches take, what they refuse, and who survives whom."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.launch import machine
from tests.launch.cluster import COMMAND, Cluster, Running
from tests.launch.kept import (
    CONFIG,
    Keeper,
    assert_only_kept_is_left,
    marks,
    processes_of,
)
from tests.launch.oracle import AFTER_S
from tests.launch.test_deaths import is_dead, kill
from tfcluster.runtime.warm.kept import logged_out

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


STATE = """
import gc, json, locale, os, random, re, resource, signal, sys, threading, warnings
# Mentions tensorflow, so that it is forked.
umask = os.umask(0)
def text(path):
    with open(path) as file:
        return file.read()
status = dict(line.split(":", 1) for line in text("/proc/self/status").splitlines())
def without_numbers(path):
    return re.sub("[0-9]+", "N", path)
def link(fd):
    try:
        return without_numbers(os.readlink(f"/proc/self/fd/{fd}"))
    except OSError:
        return None  # that of the listing itself
print(json.dumps({
    "env": dict(os.environ),
    "argv": sys.argv, "executable": sys.executable, "path": sys.path,
    "flags": list(sys.flags), "file": __file__, "main": sorted(globals()),
    "comm": text("/proc/self/comm"), "title": text("/proc/self/cmdline").rstrip("\\0"),
    "cwd": os.getcwd(), "root": os.readlink("/proc/self/root"), "umask": umask,
    "stdin": os.readlink("/proc/self/fd/0"), "data": sys.stdin.read(),
    "fds": sorted(filter(None, map(link, os.listdir("/proc/self/fd")))),
    "status": {name: status.get(name) for name in (
        "SigBlk", "SigIgn", "SigCgt", "Uid", "Gid", "Groups", "CapEff", "CapBnd",
        "CapAmb", "NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed", "Threads")},
    "limits": text("/proc/self/limits"), "nice": os.nice(0),
    "oom": text("/proc/self/oom_score_adj"), "policy": os.sched_getscheduler(0),
    "leader": os.getsid(0) == os.getpgid(0) == os.getpid(),
    "parent": text(f"/proc/{os.getppid()}/comm"),
    "handlers": [str(signal.getsignal(number)) for number in range(1, 32)],
    "wakeup": signal.set_wakeup_fd(-1), "timer": signal.getitimer(signal.ITIMER_REAL),
    "locale": locale.setlocale(locale.LC_ALL), "threads": threading.active_count(),
    "warnings": [str(each) for each in warnings.filters],
    "gc": [gc.isenabled(), gc.get_threshold()], "recursion": sys.getrecursionlimit(),
    "buffering": [sys.stdout.line_buffering, sys.stderr.encoding, sys.stdout.errors],
    "random": random.random(), "urandom": os.urandom(8).hex(),
}, default=str))
"""


OWN_TO_EACH_RUN = (
    "TF_CONFIG",
    "TFCLUSTER_AGENT",
    "TFCLUSTER_EVENTS",
    "TFCLUSTER_EVENTS_OWNER",
    "TFCLUSTER_EVENTS_SOCKET",
    "TFCLUSTER_TOKEN",
)
"""Ports, pids and tokens in the environment."""


def _other_state() -> None:
    """In the launcher's process: what differs from that of the command ``warm``."""
    os.umask(0o027)
    os.nice(3)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 8192))


def test_tasks_live_as_after_a_cold_start(keeper: Keeper) -> None:
    (keeper.cluster.folder / "train.py").write_text(STATE)

    def states() -> tuple[Running, list[dict[str, Any]]]:
        running = keeper.cluster.start(
            keeper.config,
            *("--set", "env.GIVEN=a b", "--", "--word", "a b"),
            prepare=_other_state,
            environ={"ELSEWHERE": "1", "NAME": "value"},
        )
        assert running.end() == 0, running.err
        return running, [
            json.loads(running.text(f"worker:{n}").replace(running.run, "RUN"))
            for n in (0, 1)
        ]

    cold_run, cold = states()
    assert TOOK not in cold_run.err
    kept = keeper.keep()
    run, warm = states()
    assert f"{TOOK}{kept})" in run.err
    drawn = [state.pop(each) for state in cold + warm for each in ("random", "urandom")]
    assert len(set(drawn)) == len(drawn)
    for ours, theirs in zip(warm, cold, strict=True):
        for state in (ours, theirs):
            for name in OWN_TO_EACH_RUN:
                assert state["env"].pop(name)
        assert ours.pop("env") == theirs.pop("env")
        assert ours == theirs
    assert (warm[0]["nice"], warm[0]["umask"]) == (3, 0o027)
    assert_only_kept_is_left(run, kept)


PARTS = ("kept", "server", "first guard", "guard", "first agent", "agent")
DECISIVE = {"first agent", "agent"}
"""A run ends with either of these; all others can be missed."""
USUAL = [("agent",)]
OTHERS = [
    *((part,) for part in PARTS if (part,) not in USUAL),
    ("kept", "server"),
    ("guard", "agent"),
    ("first guard", "first agent"),
    PARTS,
]


@pytest.mark.parametrize(
    "victims",
    [
        *USUAL,
        *(pytest.param(chosen, marks=pytest.mark.exhaustive) for chosen in OTHERS),
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


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "victims",
    [(), ("guard", "first guard"), ("agent", "first agent")],
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.exhaustive
def test_it_is_ended_while_its_tasks_run(keeper: Keeper) -> None:
    kept = keeper.keep()
    running = keeper.launch()
    keeper.stop()
    machine.eventually(partial(is_dead, kept), lambda: "alive", 10)
    assert keeper.listed() == []
    assert keeper.finish(running) == 0
    assert_only_kept_is_left(running, None)


@pytest.mark.exhaustive
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
    reason = (
        f"localhost: the kept interpreter with pid {kept} is not used: it was started "
        "without OMP_NUM_THREADS, which is set now"
    )
    running = keeper.launch("-v")
    assert f"{reason}\n" in running.err
    assert TOOK not in running.err
    assert running.found("note", text=reason)
    assert keeper.finish(running) == 0
    running = keeper.launch()
    assert " is not used" not in running.err
    assert running.found("note", text=reason)
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


def test_it_ends_when_its_user_has_logged_out(tmp_path: Path) -> None:
    login = tmp_path / "1000"
    for state, out in (("active", False), ("lingering", False), ("closing", True)):
        login.write_text(f"# private\nNAME=a\nSTATE={state}\nRUNTIME=/run/user/1000\n")
        assert logged_out(str(login)) is out
    login.unlink()
    assert logged_out(str(login))


@pytest.mark.exhaustive
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
    running = keeper.launch("-v")
    reason = "it was started with another value of OMP_NUM_THREADS"
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
    assert (done.returncode, done.stderr) == (
        0,
        f"nothing was kept for {other}\n",
    )
    assert machine.is_alive(kept)
    done = keeper.cluster.command("warm", "--stop", keeper.config)
    assert (done.returncode, done.stdout) == (0, f"localhost: pid {kept} ends\n")
    machine.eventually(partial(is_dead, kept), lambda: "alive", 10)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "which cluster.yaml?"),
        (("--list", "--stop"), 2, "cannot be combined with --list"),
        (("--stop", "--json"), 2, "goes only with --list"),
        (("nowhere.yaml",), 2, "nowhere.yaml: error: cannot read: No such file"),
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
            ("c.yaml", "--set", 'python=["env", "python"]'),
            2,
            "interpreters that a command starts, as in a container, cannot be kept",
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


@pytest.mark.exhaustive
def test_a_failed_import_is_shown(keeper: Keeper) -> None:
    (keeper.packages / "keras" / "__init__.py").write_text("raise OSError('no disk')\n")
    done = keeper.cluster.command("warm", keeper.config)
    assert done.returncode == 4
    cause = "TensorFlow and Keras cannot be imported: OSError: no disk"
    assert f"localhost: error: {cause}\n" in done.stderr
    assert "Traceback" not in done.stderr
    broken = keeper.packages / "keras" / "__init__.py"
    broken.write_text("import os\nprint('at fault', flush=True)\nos.abort()\n")
    done = keeper.cluster.command("warm", keeper.config)
    assert done.returncode == 4
    assert "localhost: error: it has ended during the import\n" in done.stderr
    assert "    at fault\n" in done.stderr
    assert keeper.listed() == []


@pytest.mark.exhaustive
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


@pytest.mark.slow
def test_no_secret_is_kept_or_told(keeper: Keeper) -> None:
    file = keeper.cluster.folder / "token"
    file.write_text("hunter2")
    file.chmod(0o600)
    keeper.config = keeper.cluster.file(
        f"{CONFIG}secrets: {{TF_TOKEN: {{file: {file}}}}}\n"
    )
    kept = keeper.keep()
    assert b"hunter2" not in Path(f"/proc/{kept}/environ").read_bytes()
    running = keeper.launch("-v")
    assert "it was started without TF_TOKEN, which is set now" in running.err
    assert keeper.finish(running) == 0
    assert "hunter2" not in running.err + json.dumps(running.events())


@pytest.mark.parametrize(
    "parts",
    [
        ("launcher",),
        pytest.param(("launcher", "guard", "agent"), marks=pytest.mark.slow),
    ],
    ids=", ".join,
)
def test_nothing_is_left_when_the_command_is_killed_during_the_import(
    keeper: Keeper, parts: Sequence[str]
) -> None:
    release = keeper.cluster.folder / "release"
    waits = f"import os, time\nwhile not os.path.exists({str(release)!r}):\n"
    slow = keeper.packages / "keras" / "__init__.py"
    slow.write_text(f"{waits}    time.sleep(0.02)\n")
    process = subprocess.Popen(
        [*COMMAND, "warm", keeper.config],
        cwd=keeper.cluster.folder,
        env=keeper.cluster.environ,
    )

    def importing() -> list[int]:
        found = keeper.cluster.processes()
        return [pid for pid in found if machine.title(pid) == "tfcluster: kept"]

    machine.eventually(importing, lambda: "no import", AFTER_S)
    (kept,) = importing()
    guard, agent = machine.agent_of(process.pid)
    pids = {"launcher": process.pid, "guard": guard, "agent": agent}
    kill(*(pids[part] for part in parts))
    process.wait(AFTER_S)
    if len(parts) > 1:
        release.touch()  # it notices only after the import
    for pid in (kept, guard, agent):
        machine.eventually(partial(is_dead, pid), lambda: "alive", AFTER_S)
    assert keeper.listed() == []
    assert not list((keeper.cluster.state / "warm").iterdir())


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
