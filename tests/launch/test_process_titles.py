"""Tests of what ``ps`` and ``top`` show of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.kit import machine
from tests.kit.cluster import Cluster

PROGRAM = """
import pathlib, time
me = pathlib.Path("/proc/self")
print("title", (me / "cmdline").read_bytes().rstrip(b"\\0").decode(), flush=True)
print("short", (me / "comm").read_text().strip(), flush=True)
print("up", flush=True)
while not pathlib.Path("meeting").exists():
    time.sleep(0.02)
"""


def test_every_process_of_a_run_says_what_it_is(cluster: Cluster) -> None:
    (cluster.folder / "train.py").write_text(PROGRAM)
    running = cluster.start("-n", "1", "--", "python", "train.py", "--epochs", "3").up()
    guard, agent = machine.agent_of(running.process.pid)
    assert machine.title(guard) == "tfcluster: guard"
    assert machine.title(agent) == f"tfcluster: agent {running.run}"
    shown = subprocess.run(
        ["ps", "-o", "comm=", "-p", f"{guard},{agent}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(shown.stdout.split()) == {"tfcluster-guard", "tfcluster-agent"}
    assert "title worker:0 train.py --epochs 3\n" in running.text("worker:0")
    assert "short worker:0\n" in running.text("worker:0")
    (cluster.folder / "meeting").touch()
    assert running.end() == 0


def test_a_title_is_cut_and_never_reaches_the_environment(tmp_path: Path) -> None:
    program = (
        "import os, subprocess, sys\n"
        "from tfcluster.base.process_title import set_title\n"
        "before = dict(os.environ)\n"
        "set_title('x' * 100_000, 'y' * 100)\n"
        "line = open('/proc/self/cmdline', 'rb').read()\n"
        "assert set(line[:-1]) == {ord('x')} and line.endswith(b'x\\0'), line\n"
        "assert open('/proc/self/comm').read() == 15 * 'y' + '\\n'\n"
        "environment = open('/proc/self/environ', 'rb').read()\n"
        "assert b'KEPT=whole' in environment.split(b'\\0')\n"
        "assert dict(os.environ) == before\n"
    )
    file = tmp_path / "program.py"
    file.write_text(program)
    root = str(Path(__file__).resolve().parents[2])
    subprocess.run(
        [sys.executable, str(file)],
        env={**os.environ, "KEPT": "whole", "PYTHONPATH": root},
        check=True,
    )
