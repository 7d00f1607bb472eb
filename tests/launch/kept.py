"""Kept interpreters for tests: TensorFlow is a stand-in, so that they start at once."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.json_formats import assert_format
from tests.launch import machine
from tests.launch.cluster import Cluster, Running
from tests.launch.oracle import AFTER_S

STANDIN = """
__version__ = {version!r}
import os
os.environ["SET_BY_IMPORT"] = "1"
imported_by = os.getpid()
class random:
    set_seed = staticmethod(lambda seed: None)
"""
PROGRAM = """
# Mentions tensorflow, so that it is forked.
import os, sys, time
import tensorflow
forked = tensorflow.imported_by != os.getpid()
print("up", os.environ.get("SET_BY_IMPORT"), forked, flush=True)
while not os.path.exists("meeting"):
    time.sleep(0.02)
"""
CONFIG = """
backend: local
command: python train.py
tasks: {worker: 2}
runtime: {strategy: none}
grace: 1s
"""


class Keeper:
    """A cluster with a stand-in for TensorFlow, and one kept interpreter."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.packages = cluster.folder / "packages"
        for name, version in (("tensorflow", "2.21.0"), ("keras", "3.15.0")):
            folder = self.packages / name
            folder.mkdir(parents=True)
            (folder / "__init__.py").write_text(STANDIN.format(version=version))
        cluster.environ["PYTHONPATH"] = str(self.packages)
        (cluster.folder / "train.py").write_text(PROGRAM)
        self.config = cluster.file(CONFIG)

    def keep(self, *words: str) -> int:
        """Keep an interpreter; returns its pid."""
        done = self.cluster.command("warm", self.config, *words)
        assert done.returncode == 0, done.stderr
        assert " TensorFlow 2.21.0, Keras 3.15.0" in done.stdout
        (kept,) = self.listed()
        assert f"pid {kept['pid']} " in done.stdout
        return int(kept["pid"])

    def listed(self) -> list[dict[str, Any]]:
        done = self.cluster.command("warm", "--list", "--json")
        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert_format("warm", document)
        found: list[dict[str, Any]] = document["interpreters"]
        return found

    def launch(self, *words: str) -> Running:
        """Launch the program, and wait until its tasks are up."""
        running = self.cluster.start(self.config, *words)
        running.wait_for_text("up", "worker:0", "worker:1")
        return running

    def finish(self, running: Running) -> int:
        """Let the program end."""
        (self.cluster.folder / "meeting").touch()
        try:
            return running.end()
        finally:
            (self.cluster.folder / "meeting").unlink()

    def stop(self) -> None:
        done = self.cluster.command("warm", "--stop")
        assert done.returncode == 0, done.stderr


def processes_of(running: Running, kept: int) -> dict[str, int]:
    """The processes of a run that has taken the kept interpreter, by their part."""
    launcher = running.process.pid
    first_guard, first_agent = machine.agent_of(launcher)
    (guard,) = [
        pid
        for pid in machine.children(kept)
        if machine.title(pid) == "tfcluster: guard"
    ]
    (agent,) = machine.children(guard)
    tasks = {
        event["pid"] for event in running.found("task", state="running") if event["pid"]
    }
    (server,) = [pid for pid in machine.children(agent) if pid not in tasks]
    return {
        "launcher": launcher,
        "first guard": first_guard,
        "first agent": first_agent,
        "guard": guard,
        "agent": agent,
        "server": server,
        "kept": kept,
    }


def assert_only_kept_is_left(running: Running, kept: int | None) -> None:
    """Check that no process is left but the kept interpreter, which is unharmed."""
    spared = set() if kept is None else {kept}

    def left() -> list[str]:
        marked = set(machine.carrying(f"TFCLUSTER_RUN={running.run}"))
        marked |= set(running.cluster.processes())
        alive = [pid for pid in marked - spared if machine.is_alive(pid)]
        return [f"{pid} {machine.cmdline(pid)}" for pid in alive]

    machine.eventually(lambda: not left(), lambda: str(left()), AFTER_S)
    assert all(map(machine.is_alive, spared))


def python() -> str:
    return os.path.abspath(sys.executable)  # noqa: PTH100 - a link must not be resolved


def marks(pid: int) -> set[bytes]:
    """The names of tfcluster's variables in what /proc shows as the environment."""
    found = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return {entry.split(b"=")[0] for entry in found if entry.startswith(b"TFCLUSTER_")}
