"""``python`` as a command of several words: wrappers, containers, runners."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.cluster import Cluster, Running
from tests.kit.machine import agent_of
from tests.kit.oracle import assert_nothing_left
from tests.launch.uv import installed_uv

RANKS = """\
import os, sys
import tfcluster.runtime as tfc
tfc.init()
print("ranks", tfc.allgather_object(tfc.rank()), os.environ.get("X"), flush=True)
print("parent", open(f"/proc/{os.getppid()}/cmdline").read()[:16], flush=True)
"""
WAITS = """\
import signal, sys
def obey(number, frame):
    print("obeyed", number, flush=True)
    sys.exit(33)
signal.signal(signal.SIGTERM, obey)
print("up", flush=True)
signal.pause()
"""
# Passes on nothing but its standard streams, as a runner in Python does by default.
CLOSES = """\
import os, subprocess, sys
os.environ["X"] = "closed"
sys.exit(subprocess.call(sys.argv[1:]))
"""
CONTAINER = ("bwrap", "--dev-bind", "/", "/", "--proc", "/proc")
HIDES = (*CONTAINER, "--unshare-pid")

needs_bwrap = pytest.mark.skipif(
    shutil.which("bwrap") is None
    or subprocess.run([*HIDES, "true"], check=False).returncode != 0,
    reason="bwrap is not installed, or may not make namespaces",
)


def launched(
    cluster: Cluster, python: tuple[str, ...], program: str, *options: str
) -> Running:
    """Launch two workers that run ``program`` under this interpreter."""
    (cluster.folder / "program.py").write_text(program)
    words = json.dumps([*python, sys.executable])
    given = ("-n", "2", "--set", f"python={words}", "--set", "grace=5s", *options)
    return cluster.start(*given, "--", "python", "program.py")


def plain(cluster: Cluster, python: tuple[str, ...], program: str) -> Running:
    return launched(cluster, python, program, "--set", "runtime.strategy=none")


@pytest.mark.tensorflow
@pytest.mark.parametrize(
    "wrapper",
    [
        pytest.param(("env", "X=1"), id="env", marks=pytest.mark.exhaustive),
        pytest.param(("nice", "-n5"), id="nice", marks=pytest.mark.exhaustive),
        pytest.param(CONTAINER, id="bwrap", marks=[needs_bwrap, pytest.mark.slow]),
        pytest.param((sys.executable, "closes.py"), id="descriptors are closed"),
        pytest.param(
            ("bash", "-c", 'exec "$@" </dev/null', "bash"),
            id="another standard input",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_tasks_are_forked_below_the_command(
    cluster: Cluster, wrapper: tuple[str, ...]
) -> None:
    (cluster.folder / "closes.py").write_text(CLOSES)
    running = launched(cluster, wrapper, RANKS)
    assert running.end(100) == 0, running.out + running.err
    for task in ("worker:0", "worker:1"):
        assert "ranks [0, 1]" in running.text(task)
        assert "parent tfcluster: agent" in running.text(task)
    assert "one by one" not in running.err
    assert "swept" not in running.err
    assert_nothing_left(running)


@needs_bwrap
@pytest.mark.tensorflow
@pytest.mark.slow
def test_a_container_that_hides_its_processes(cluster: Cluster) -> None:
    """Tasks are not forked there, but each is started through the command."""
    running = launched(cluster, HIDES, RANKS)
    assert running.end(100) == 0, running.out + running.err
    for task in ("worker:0", "worker:1"):
        assert "ranks [0, 1]" in running.text(task)
    assert (
        "localhost: tasks are started one by one, which takes longer: " in running.err
    )
    assert_nothing_left(running)


@pytest.mark.parametrize(
    "wrapper",
    [
        pytest.param(("env", "X=1"), id="env"),
        pytest.param((sys.executable, "closes.py"), id="a parent process"),
        pytest.param(HIDES, id="bwrap", marks=needs_bwrap),
    ],
)
def test_signals_and_exit_codes_pass_the_command(
    cluster: Cluster, wrapper: tuple[str, ...]
) -> None:
    (cluster.folder / "closes.py").write_text(CLOSES)
    failed = plain(cluster, wrapper, "import sys; sys.exit(9)")
    assert failed.end() == 9
    assert failed.report()["first_failure"]["exit_code"] == 9
    running = plain(cluster, wrapper, WAITS).up(count=2)
    running.signal(signal.SIGTERM)
    assert running.end() == 143
    for task in ("worker:0", "worker:1"):
        assert running.text(task).endswith(f"obeyed {signal.SIGTERM.value}\n")
    assert_nothing_left(running)


@pytest.mark.parametrize(
    "wrapper",
    [
        pytest.param((sys.executable, "closes.py"), id="a parent process"),
        pytest.param(HIDES, id="bwrap", marks=[needs_bwrap, pytest.mark.slow]),
    ],
)
def test_nothing_outlives_a_killed_agent(
    cluster: Cluster, wrapper: tuple[str, ...]
) -> None:
    (cluster.folder / "closes.py").write_text(CLOSES)
    deaf = WAITS.replace("signal.SIGTERM, obey", "signal.SIGTERM, signal.SIG_IGN")
    running = plain(cluster, wrapper, deaf).up(count=2)
    _, agent = agent_of(running.process.pid)
    os.kill(agent, signal.SIGKILL)
    assert running.end() == 5
    assert_nothing_left(running)


@pytest.mark.tensorflow
def test_variables_must_reach_python(cluster: Cluster) -> None:
    """Without the marks, nothing could end the processes."""
    running = launched(cluster, ("env", "-i", "X=1"), RANKS)
    assert running.end() == 4
    assert "removes variables from the environment, TFCLUSTER_RUN among" in running.err
    assert "install it" not in running.err
    cold = launched(cluster, ("env", "-i"), RANKS, "--set", "runtime.warm_start=false")
    assert cold.end() == 1
    assert "removes variables from the environment" in cold.text("worker:0")
    assert_nothing_left(cold)


def test_plan_and_doctor_use_the_command(cluster: Cluster) -> None:
    (cluster.folder / "program.py").write_text(RANKS)
    config = cluster.file(
        f"command: python program.py\npython: [env, X=1, {sys.executable}]\n"
        "tasks: {worker: 2}\n"
    )
    plan = json.loads(cluster.command("plan", config, "--json").stdout)
    argv = ["env", "X=1", sys.executable, "program.py"]
    assert [task["argv"] for task in plan["tasks"]] == [argv] * 2
    done = cluster.command("doctor", config, "--quick")
    assert done.returncode == 0, done.stderr
    config = cluster.file(
        f"command: python program.py\npython: [env, -i, {sys.executable}]\n"
        "tasks: {worker: 2}\n"
    )
    done = cluster.command("doctor", config, "--quick")
    assert done.returncode == 4
    assert "error: the command of 'python' removes variables" in done.stderr


@pytest.mark.slow
def test_uv_runs_python(cluster: Cluster, tmp_path: Path) -> None:
    uv = installed_uv(tmp_path)
    runner = (uv, "run", "--no-project", "--python", sys.executable)
    running = plain(cluster, runner, "print('here')")
    assert running.end() == 0, running.err
    assert "here" in running.text("worker:1")
    assert_nothing_left(running)
