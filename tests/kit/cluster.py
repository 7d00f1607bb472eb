"""Drives the real command in its own state folder, with a deadline on every wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil

from tests.kit.json_formats import assert_format
from tests.kit.machine import carrying
from tests.kit.waiting import eventually
from tfcluster.commands.record_query import one_run

DEADLINE_S = 50.0
COMMAND = (sys.executable, "-m", "tfcluster")
PYTHON = (sys.executable, "-S", "-u")
"""For programs in tests: starts in 20 ms and cannot import tfcluster."""

_FINAL = {"succeeded", "failed", "stopped", "lost"}


class Cluster:
    """A state folder and a working folder that all commands of a test use."""

    def __init__(self, folder: Path, environ: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.state = folder / "state"
        kept = {k: v for k, v in os.environ.items() if not k.startswith("TFCLUSTER_")}
        self.environ = {
            **kept,
            "TFCLUSTER_STATE_DIR": str(self.state),
            **(environ or {}),
        }
        self.launches: list[Running] = []

    def command(
        self, *words: str, timeout_s: float = DEADLINE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [*COMMAND, *words],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=timeout_s,
            check=False,
        )

    def bash_line(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run a line of bash, for tests of what a shell does."""
        return subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def start(
        self,
        *words: str,
        command: Sequence[str] = COMMAND,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        prepare: Callable[[], None] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Running:
        """Start ``tfcluster launch``; output goes to files unless redirected.

        ``prepare`` runs in the child before the command does.
        """
        number = len(self.launches)
        out, err = self.folder / f"out-{number}", self.folder / f"err-{number}"
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = subprocess.Popen(
                [*command, "launch", *words],
                cwd=self.folder,
                env={**self.environ, **(environ or {})},
                stdin=stdin,
                stdout=out_file if stdout is None else stdout,
                stderr=err_file if stderr is None else stderr,
                preexec_fn=prepare,
                start_new_session=prepare is None,
            )
        running = Running(self, process, out, err)
        self.launches.append(running)
        return running

    def bash(self, script: str, *options: str, count: int = 1) -> Running:
        """Launch ``count`` workers that run a shell script."""
        return self.start(*plain(*options, count=count), "--", "bash", "-c", script)

    def python(self, code: str, *options: str, count: int = 1) -> Running:
        """Launch ``count`` workers that run Python code."""
        return self.start(*plain(*options, count=count), "--", *PYTHON, "-c", code)

    def file(self, text: str, name: str = "cluster.yaml") -> str:
        """Write a cluster.yaml and return its path."""
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o644)
        return str(path)

    def run_ids(self) -> list[str]:
        try:
            return sorted(path.name for path in (self.state / "runs").iterdir())
        except FileNotFoundError:
            return []

    def status(self, run: str) -> dict[str, Any]:
        done = self.command("status", run, "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert_format("status", found)
        return found

    def recorded(self, run: str) -> dict[str, Any]:
        """Return what ``status`` prints, without the cost of starting a command."""
        found: dict[str, Any] = json.loads(
            json.dumps(one_run(run, self.environ).to_json())
        )
        return found

    def end(self) -> None:
        """Kill the launchers that a failed test has left."""
        for running in self.launches:
            if running.process.poll() is None:
                running.process.kill()
                running.process.wait()

    def processes(self) -> list[int]:
        """Return all processes that were started with this state folder."""
        return carrying(f"TFCLUSTER_STATE_DIR={self.state}")


def plain(*options: str, count: int) -> list[str]:
    """Return the options of a launch without a file and without the runtime."""
    return ["-n", str(count), "--set", "runtime.strategy=none", *options]


class Running:
    """A launch in progress, known only through its output and its record."""

    def __init__(
        self, cluster: Cluster, process: subprocess.Popen[bytes], out: Path, err: Path
    ) -> None:
        self.cluster = cluster
        self.process = process
        self._out, self._err = out, err
        self._run: str | None = None

    # --- output ---------------------------------------------------------------------

    @property
    def out(self) -> str:
        return self._out.read_bytes().decode(errors="surrogateescape")

    @property
    def err(self) -> str:
        return self._err.read_bytes().decode(errors="surrogateescape")

    @property
    def run(self) -> str:
        """The run id, from the first line on stderr."""
        if self._run is None:
            eventually(
                lambda: "\n" in self.err or self.process.poll() is not None,
                lambda: "no word of the run",
                DEADLINE_S,
            )
            first = self.err.partition("\n")[0]
            assert first.startswith("run "), self.err
            self._run = first.removeprefix("run ")
        return self._run

    def adopt(self, run: str) -> None:
        """Set the run id, for a launch whose stderr is redirected."""
        self._run = run

    # --- the record -----------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return self.cluster.state / "runs" / self.run

    def log(self, task: str) -> Path:
        return self.folder / "logs" / f"{task.replace(':', '-')}.log"

    def text(self, task: str) -> str:
        try:
            return self.log(task).read_bytes().decode(errors="surrogateescape")
        except FileNotFoundError:
            return ""

    def events(self) -> list[dict[str, Any]]:
        try:
            data = (self.folder / "events.jsonl").read_bytes()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in data.rpartition(b"\n")[0].splitlines()]

    def found(self, type_: str, /, **keys: object) -> list[dict[str, Any]]:
        wanted = {"type": type_, **keys}
        return [e for e in self.events() if wanted.items() <= e.items()]

    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        assert_format("status", found)
        return found

    def plan(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "plan.json").read_text())
        return found

    def status(self) -> dict[str, Any]:
        return self.cluster.status(self.run)

    # --- waiting --------------------------------------------------------------------

    def wait_for(
        self, type_: str, /, timeout_s: float = DEADLINE_S, **keys: object
    ) -> dict[str, Any]:
        """Wait for an event of this type with these keys, and return the first one."""
        self._wait(
            lambda: bool(self.found(type_, **keys)),
            lambda: f"no {type_} {keys} among {self.events()}",
            timeout_s,
        )
        return self.found(type_, **keys)[0]

    def wait_for_text(
        self, text: str, *tasks: str, timeout_s: float = DEADLINE_S
    ) -> None:
        """Wait until each of the tasks has written ``text`` to its log."""
        for task in tasks:
            self._wait(
                partial(self._says, task, text), partial(self._said, task), timeout_s
            )

    def wait_for_err(self, text: str, timeout_s: float = DEADLINE_S) -> None:
        """Wait for ``text`` on stderr, which comes a moment later than the record."""
        self._wait(lambda: text in self.err, lambda: f"{text!r} not said", timeout_s)

    def _wait(
        self, condition: Callable[[], bool], what: Callable[[], str], timeout_s: float
    ) -> None:
        """Wait until ``condition`` is true, but only while the launcher lives."""
        ended = False

        def over() -> bool:
            nonlocal ended
            ended = self.process.poll() is not None
            return condition() or ended

        eventually(over, lambda: f"{what()}; {self.err}", timeout_s)
        assert condition(), f"it has ended: {what()}; {self.err}"

    def _says(self, task: str, text: str) -> bool:
        return text in self.text(task)

    def _said(self, task: str) -> str:
        return f"{task} said {self.text(task)!r}"

    def up(self, text: str = "up", count: int = 1) -> Running:
        """Wait until all workers have printed ``text``."""
        self.wait_for_text(text, *(f"worker:{index}" for index in range(count)))
        return self

    def end(self, timeout_s: float = DEADLINE_S) -> int:
        """Wait for the end of the launch and return its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            itself = psutil.Process(self.process.pid)
            tree = [
                f"{process.pid} {process.name()} {process.status()}"
                for process in (itself, *itself.children(recursive=True))
            ]
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
            raise AssertionError(
                f"{self.run} did not end within {timeout_s:g} s: {tree}; "
                f"{self.events()}; {self.err}"
            ) from None

    def end_timed(self, timeout_s: float = DEADLINE_S) -> tuple[int, float]:
        """Return the exit code and the number of seconds waited for it."""
        began = time.monotonic()
        return self.end(timeout_s), time.monotonic() - began

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


def is_final(state: str) -> bool:
    return state in _FINAL


def console_script() -> Path | None:
    """Return the command installed beside this interpreter, if there is one."""
    path = Path(sys.executable).parent / "tfcluster"
    return path if path.exists() else None
