"""Where trials take place: this machine, or a rig of hosts with sshd or a scheduler.

A site knows how to launch there, whose processes are on which host, and what is left.
It knows no fault.
"""

from __future__ import annotations

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.kit import machine
from tests.kit.cluster import Cluster, Running
from tests.kit.waiting import eventually
from tests.rigs.chaos.faults import LOCAL, SGE, SLURM, SSH
from tests.rigs.testbed import Host, Options, Testbed
from tests.rigs.testbed.commands import RigError
from tests.rigs.testbed.processes import Process, processes
from tests.schedulers.ssh.rig_launches import (
    USER,
    HostProcesses,
    RigCluster,
    by_role,
)

_LISTENING = "0A"  # include/net/tcp_states.h


class Site(ABC):
    """One kind of site, with ``hosts`` on which tasks run."""

    name: str
    hosts: tuple[str, ...]

    @abstractmethod
    def cluster(self, number: int) -> Cluster:
        """A state folder and a working folder for a trial."""

    @abstractmethod
    def keys(self) -> dict[str, Any]:
        """The part of the configuration that describes the hosts."""

    @abstractmethod
    def processes(self, cluster: Cluster, host: str) -> list[Process]:
        """The processes of the cluster's runs there."""

    @abstractmethod
    def launcher(self, running: Running) -> list[int]:
        """The launcher of the run, if it lives."""

    @abstractmethod
    def left(self, running: Running, run: str) -> list[str]:
        """What the run has left, without processes of sshd and jobs."""

    def jobs(self) -> list[str]:
        """The numbers of jobs that the scheduler has."""
        return []

    @abstractmethod
    def sessions(self, cluster: Cluster) -> list[str]:
        """Connections of sshd that are still open."""

    @abstractmethod
    def repair(self, cluster: Cluster) -> None:
        """Undo every fault, and end whatever a bad trial has left."""

    @abstractmethod
    def close(self) -> None:
        """Remove the site."""

    def roles(self, cluster: Cluster, host: str) -> HostProcesses:
        return by_role(self.processes(cluster, host))

    def client(self, running: Running) -> list[int]:
        """The command that the user has started, which may be the launcher."""
        return self.launcher(running)


class LocalSite(Site):
    name = LOCAL
    hosts = ("localhost",)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.clusters: list[Cluster] = []

    def cluster(self, number: int) -> Cluster:
        folder = self._folder / f"trial-{number}"
        folder.mkdir(parents=True)
        self.clusters.append(Cluster(folder))
        return self.clusters[-1]

    def keys(self) -> dict[str, Any]:
        return {"backend": "local"}

    def processes(self, cluster: Cluster, host: str) -> list[Process]:
        return processes(os.getpid(), f"TFCLUSTER_STATE_DIR={cluster.state}")

    def launcher(self, running: Running) -> list[int]:
        return [running.process.pid] if running.process.poll() is None else []

    def left(self, running: Running, run: str) -> list[str]:
        # The agent adds the run's marker to the environment of tasks only.
        pids = set(machine.carrying(f"TFCLUSTER_RUN={run}"))
        pids |= set(running.cluster.processes())
        found = [f"{p} {machine.cmdline(p)}" for p in pids if machine.is_alive(p)]
        temporary = Path(tempfile.gettempdir())
        found += map(str, temporary.glob(_kept(os.geteuid(), run)))
        return found + _listeners(Path("/proc/self"), _ports(running, run), self.name)

    def sessions(self, cluster: Cluster) -> list[str]:
        return []

    def repair(self, cluster: Cluster) -> None:
        for pid in cluster.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, 9)

    def close(self) -> None:
        pass


class RigSite(Site):
    """Hosts made of namespaces; the user launches on the host ``login``."""

    def __init__(self, name: str, hosts: int) -> None:
        options = Options(nodes=hosts, slurm=name == SLURM, sge=name == SGE)
        self.name = name
        self.rig = Testbed.up(options)
        self.hosts = tuple(host.name for host in self.rig.nodes)

    def cluster(self, number: int) -> RigCluster:
        return RigCluster(self.rig, self.rig.accounts[USER].home / f"trial-{number}")

    def keys(self) -> dict[str, Any]:
        count = len(self.hosts)
        if self.name == SLURM:
            # A job that begins again would be another run; and Slurm gives up a host,
            # with all of its jobs, sooner than tfcluster does.
            section = {"nodes": count, "tasks_per_node": 1, "time": "10"}
            section["options"] = ["--no-requeue", "--no-kill"]
            return {"backend": SLURM, "slurm": section}
        if self.name == SGE:
            section = {"parallel_environment": "tf", "slots": count}
            return {"backend": SGE, "sge": section}
        return {"backend": SSH, "hosts": list(self.hosts)}

    def processes(self, cluster: Cluster, host: str) -> list[Process]:
        return self.rig.host(host).processes()

    def client(self, running: Running) -> list[int]:
        # The child of the ``nsenter`` into its host.
        if running.process.poll() is not None:
            return []
        return machine.children(running.process.pid)[:1]

    def launcher(self, running: Running) -> list[int]:
        if self.name == SSH:
            return self.client(running)
        return [
            process.pid
            for host in self.rig.nodes
            for process in host.processes()
            if "--submitted" in process.argv and "-m" in process.argv
        ]

    def left(self, running: Running, run: str) -> list[str]:
        found = [
            f"{host.name}: {process.pid} {' '.join(process.argv)[:200]}"
            for host, process in self._of_user()
            if not _of_sshd(process)
        ]
        ports = _ports(running, run)
        for host in self.rig.hosts:
            if not host.alive:
                continue
            proc = Path(f"/proc/{host.where().pid}")
            found += _listeners(proc, ports, host.name)
            number = self.rig.accounts[USER].number
            kept = (proc / "root" / "tmp").glob(_kept(number, run))
            found += [f"{host.name}: {path}" for path in kept]
        return found

    def sessions(self, cluster: Cluster) -> list[str]:
        return [
            f"{host.name}: {' '.join(process.argv)}"
            for host, process in self._of_user()
            if _of_sshd(process)
        ]

    def jobs(self) -> list[str]:
        if self.name == SLURM:
            return self._asked("squeue", "--noheader", "--format=%A").split()
        if self.name == SGE:
            lines = self._asked("qstat", "-u", "*").splitlines()[2:]
            return [line.split()[0] for line in lines]
        return []

    def _asked(self, *argv: str) -> str:
        try:
            done = self.rig.login.run(argv, user=USER)
        except RigError:
            return "unknown"  # the scheduler does not answer
        return done.stdout if done.returncode == 0 else "unknown"

    def _of_user(self) -> Iterator[tuple[Host, Process]]:
        number = self.rig.accounts[USER].number
        for host in self.rig.hosts:
            for process in host.processes():
                if process.user == number:
                    yield host, process

    def repair(self, cluster: Cluster) -> None:
        cluster.end()
        self.rig.repair()
        if jobs := self.jobs():
            for cancel in ("scancel",) if self.name == SLURM else ("qdel",):
                self.rig.login.run((cancel, *jobs), user=USER)

            def gone() -> bool:
                return not self.jobs()

            eventually(gone, lambda: f"jobs {self.jobs()}", 90.0)
            self.rig.repair()

    def close(self) -> None:
        self.rig.down()


def _of_sshd(process: Process) -> bool:
    return process.argv[:1] != () and process.argv[0].startswith("sshd: ")


def _kept(user: int, run: str) -> str:
    return f"tfcluster-{user}-{run}-*"


def _ports(running: Running, run: str) -> list[tuple[str, int]]:
    """Pairs of host and port of the tasks."""
    if not run:
        return []
    try:
        tasks = running.plan()["tasks"]
    except (FileNotFoundError, ValueError):
        return []  # the oracle finds a damaged plan
    return [
        (str(t["host"]).partition(".")[0], int(end))
        for t in tasks
        if t["address"]
        for end in [str(t["address"]).rpartition(":")[2]]
        if end.isdecimal()
    ]


def _listeners(proc: Path, ports: list[tuple[str, int]], host: str) -> list[str]:
    """The run's ports that still have a listener on this host."""
    wanted = {port for where, port in ports if where in (host, "localhost")}
    found = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (proc / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING:
                    found.add(int(fields[1].rpartition(":")[2], 16))
    return [f"{host}: port {port}" for port in sorted(wanted & found)]
