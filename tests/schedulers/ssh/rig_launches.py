"""Launches from the login host of a rig, and finds their processes on all hosts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, CompletedProcess
from typing import IO, Any

from tests.kit import machine
from tests.kit.cluster import COMMAND, DEADLINE_S, Cluster, Running
from tests.rigs.testbed import Host, Testbed
from tests.rigs.testbed.host import Login
from tests.rigs.testbed.layout import REPOSITORY
from tests.rigs.testbed.processes import Process

USER = "alice"
# The titles that these processes set with ``process_title``.
_GUARD = "tfcluster: guard"
_AGENT = "tfcluster: agent"
_WARM = "tfcluster: warm"


class RigCluster(Cluster):
    """A state folder shared by all hosts of a rig, and a user who launches over SSH."""

    def __init__(self, rig: Testbed, folder: Path) -> None:
        super().__init__(folder)
        self.rig = rig
        self._env = {
            "TFCLUSTER_STATE_DIR": str(self.state),
            "PYTHONPATH": str(REPOSITORY),
        }
        number = rig.accounts[USER].number
        folder.mkdir(parents=True, exist_ok=True)
        os.chown(folder, number, number)

    def command(
        self, *words: str, timeout_s: float = DEADLINE_S, host: str = "login"
    ) -> CompletedProcess[str]:
        """Run a tfcluster command on a host, and wait for its end."""
        argv = (*COMMAND, *words)
        return self.rig.host(host).run(
            argv, user=USER, cwd=self.folder, env=self._env, timeout_s=timeout_s
        )

    def recorded(self, run: str) -> dict[str, Any]:
        """The record, from a host of the rig: only there are live processes known."""
        return self.status(run)

    def start(
        self,
        *words: str,
        command: Sequence[str] = COMMAND,
        stdin: int | IO[bytes] = DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
        prepare: Callable[[], None] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Running:
        """Start ``tfcluster launch`` on the login host."""
        login = Login(user=USER, cwd=self.folder, env={**self._env, **(environ or {})})
        return super().start(
            *words,
            command=self.rig.login.argv(command, login),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            prepare=prepare,
        )

    def shell(self, script: str, hosts: str, *options: str, count: int) -> Running:
        """Launch ``count`` workers that run a shell script on ``hosts``."""
        return self.start(*over_ssh(hosts, *options, count=count), *bash(script))

    def processes(self) -> list[int]:
        """All processes of the user, on every host that has power."""
        number = self.rig.accounts[USER].number
        return [
            process.pid
            for host in self.rig.hosts
            for process in host.processes()
            if process.user == number
        ]

    def end(self) -> None:
        """Kill what a failed test has left."""
        super().end()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def over_ssh(hosts: str, *options: str, count: int) -> list[str]:
    """Options of a launch without a configuration file and without the runtime."""
    where = ("-n", str(count), "--hosts", hosts, "--set", "backend=ssh")
    return [*where, "--set", "runtime.strategy=none", *options]


def bash(script: str) -> tuple[str, ...]:
    return ("--", "bash", "-c", script)


def launcher(running: Running) -> list[int]:
    """The launcher itself, which is the child of the ``nsenter`` into its host."""
    if running.process.poll() is not None:
        return []
    return machine.children(running.process.pid)[:1]


@dataclass(frozen=True, slots=True)
class HostProcesses:
    """The processes of a run on one host; pids are in this machine's PID namespace."""

    guards: list[int]
    agents: list[int]
    warm: list[int]
    tasks: list[int]
    others: list[int]
    """Processes that the tasks have started."""
    sessions: list[int]
    """Processes of sshd: for each connection one as root and one as the user."""


def host_processes(host: Host) -> HostProcesses:
    return by_role(host.processes())


def by_role(found: Sequence[Process]) -> HostProcesses:
    """Tell the processes of a run on one host apart."""
    guards = [process.pid for process in found if _has(process, _GUARD)]
    agents = [process.pid for process in found if _has(process, _AGENT)]
    pids = {*guards, *agents}
    begun = [process for process in found if process.parent in agents]
    warm = [process.pid for process in begun if _has(process, _WARM)][:1]
    tasks = [process.pid for process in begun if process.pid not in warm]
    known = {*pids, *warm, *tasks}
    return HostProcesses(
        guards=guards,
        agents=agents,
        warm=warm,
        tasks=tasks,
        others=[
            process.pid
            for process in found
            if process.pid not in known
            and any(entry.startswith("TFCLUSTER_TASK=") for entry in process.environ)
        ],
        sessions=[p.pid for p in found if _has(p, f"sshd: {USER}")],
    )


def _has(process: Process, words: str) -> bool:
    return any(words in word for word in process.argv)
