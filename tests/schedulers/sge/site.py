"""Helpers for tests with a real Grid Engine: files, jobs and inspection."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.kit.waiting import eventually
from tests.rigs.testbed import Host, Testbed
from tests.rigs.testbed.daemons import InsideProcess
from tests.rigs.testbed.host import Login
from tests.rigs.testbed.layout import REPOSITORY

WAIT_S = 60.0
USER = "alice"

# Prints a line of JSON, then runs until the file named by its argument exists.
_TASK = """\
import json, os, pathlib, sys, time
print("task", json.dumps({"task": os.environ["TFCLUSTER_TASK"],
    "host": os.uname().nodename, "config": json.loads(os.environ["TF_CONFIG"])}))
sys.stdout.flush()
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.1)
"""


def wait_for(found: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    return eventually(found, what, timeout_s, poll_s=0.2)


@dataclass
class Site:
    """A user's folder on a rig with Grid Engine, and commands that run in it."""

    rig: Testbed
    folder: Path
    python: str
    started: list[InsideProcess] = field(default_factory=list)

    @property
    def login(self) -> Host:
        return self.rig.login

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def heard(self) -> Path:
        """The file with the output of the command that was started last."""
        return self.folder / "heard"

    @property
    def go(self) -> Path:
        """The tasks end once this file exists."""
        return self.folder / "go"

    def variables(self) -> dict[str, str]:
        return {"TFCLUSTER_STATE_DIR": str(self.state), "PYTHONPATH": str(REPOSITORY)}

    def config(self, tasks: dict[str, Any], **keys: Any) -> Path:
        """Write a cluster.yaml whose tasks print their identity and wait for ``go``."""
        program = self.folder / "task.py"
        self.write(program, _TASK)
        content = {
            "backend": "sge",
            "command": ["python", str(program), str(self.go)],
            "tasks": tasks,
            "runtime": {"strategy": "none"},
            "grace": "3s",
            **keys,
        }
        path = self.folder / "cluster.yaml"
        self.write(path, yaml.safe_dump(content))
        return path

    def write(self, path: Path, text: str) -> None:
        self.login.run(("tee", str(path)), user=USER, stdin=text)

    def argv(self, *words: str) -> tuple[str, ...]:
        return (self.python, "-m", "tfcluster", *words)

    def start(self, *words: str) -> InsideProcess:
        """Start ``tfcluster WORDS`` on the login host, in the background."""
        login = Login(user=USER, cwd=self.folder, env=self.variables())
        with self.heard.open("wb") as output:
            argv = self.argv(*words)
            process = self.login.popen(argv, login=login, stdout=output)
        self.started.append(process)
        return process

    def finish(
        self, process: InsideProcess, timeout_s: float = WAIT_S
    ) -> tuple[int, str]:
        """Wait for the process; returns its exit code and its output."""
        code = process.wait(timeout=timeout_s)
        return code, self.heard.read_text()

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run ``tfcluster WORDS`` on the login host."""
        return self.login.run(
            self.argv(*words), user=USER, cwd=self.folder, env=self.variables()
        )

    def sge(self, *argv: str) -> str:
        """Run a Grid Engine command on the login host; returns its output."""
        return self.login.output(argv, user=USER, cwd=self.folder)

    def runs(self) -> list[dict[str, Any]]:
        """All runs, newest first."""
        done = self.run("status", "--json")
        return list(json.loads(done.stdout)["runs"]) if done.stdout.strip() else []

    def status(self) -> dict[str, Any]:
        """The newest run; empty if there is none."""
        return next(iter(self.runs()), {})

    def reason(self) -> str:
        """The line of ``status`` with the reason for the newest run's state."""
        lines = self.run("status").stdout.splitlines()
        return next((line for line in lines if line.startswith("reason:")), "")

    def jobs(self) -> list[str]:
        """The ids of all jobs that Grid Engine still knows."""
        lines = self.sge("qstat", "-u", "*").splitlines()[2:]
        return [line.split()[0] for line in lines]

    def said(self) -> dict[str, dict[str, Any]]:
        """The line of JSON that each task has printed, by task."""
        found = {}
        for log in sorted(self.state.glob("runs/*/logs/*.log")):
            for line in log.read_text(errors="replace").splitlines():
                if line.startswith("task {"):
                    told = json.loads(line.removeprefix("task "))
                    found[told["task"]] = told
        return found

    def wait_for_tasks(self, count: int) -> dict[str, dict[str, Any]]:
        wait_for(lambda: len(self.said()) == count, f"{count} tasks")
        return self.said()

    def leftovers(self) -> list[str]:
        """All processes of the user on the nodes."""
        number = self.rig.accounts[USER].number
        return [
            f"{host.name}: {' '.join(process.argv)[:200]}"
            for host in self.rig.nodes
            for process in host.processes()
            if process.user == number
        ]

    def nothing_is_left(self) -> None:
        wait_for(lambda: not self.jobs(), "end of all jobs")
        wait_for(lambda: not self.leftovers(), "end of all processes", 20.0)


def site_on(rig: Testbed, folder: Path, python: str) -> Iterator[Site]:
    """A separate site for one test, after which all jobs are removed."""
    rig.login.output(("mkdir", "-m", "700", "-p", str(folder)), user=USER)
    site = Site(rig, folder, python)
    try:
        yield site
    finally:
        for process in site.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.communicate()
        if jobs := site.jobs():
            rig.login.run(("qdel", *jobs), user=USER)
            wait_for(lambda: not site.jobs(), "end of all jobs", 90.0)
