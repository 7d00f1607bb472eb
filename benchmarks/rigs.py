"""Runs commands on the login host of a test rig and measures their time and CPU time.

The rig's hosts share this machine. If it also runs other programs, CPU times are more
reliable than wall times.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep

from tests.rigs.testbed import Host, Options, Testbed
from tests.rigs.testbed.daemons import InsideProcess
from tests.rigs.testbed.host import Login
from tests.rigs.testbed.layout import REPOSITORY

USER = "alice"
TIMEOUT_S = 600.0
_TICKS = os.sysconf("SC_CLK_TCK")
_END_S = 0.5
"""How long processes that a command started may take to end after it."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The wall time of a command, and its CPU time on the login host and on nodes."""

    seconds: float
    cpu_s: float
    nodes_cpu_s: float

    @property
    def together_s(self) -> float:
        return self.cpu_s + self.nodes_cpu_s


@dataclass(frozen=True, slots=True)
class Usage:
    """The resources that a running process has used so far."""

    cpu_s: float
    rss_kib: int
    threads: int
    files: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """The usage of a process. Raises OSError if the process has ended."""
        folder = Path("/proc", str(pid))
        fields = folder.joinpath("stat").read_text().rpartition(")")[2].split()
        lines = folder.joinpath("status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        return cls(
            cpu_s=(int(fields[11]) + int(fields[12])) / _TICKS,
            rss_kib=int(status["VmHWM"].split()[0]),
            threads=int(status["Threads"]),
            files=len(list(folder.joinpath("fd").iterdir())),
        )


@dataclass(slots=True)
class Bench:
    """A user's folder on a rig."""

    rig: Testbed
    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        return {
            "TFCLUSTER_STATE_DIR": str(self.folder / "state"),
            "PYTHONPATH": str(REPOSITORY),
        }

    def hosts(self, count: int) -> str:
        return f"node[1-{count}]"

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        self.rig.login.run(("tee", str(path)), user=USER, stdin=text)
        return path

    def launch(self, count: int, *command: str) -> tuple[str, ...]:
        """The command that launches one task on each of ``count`` hosts over SSH."""
        where = ("-n", str(count), "--hosts", self.hosts(count))
        words = ("backend=ssh", "workdir=/", "runtime.strategy=none")
        settings = tuple(word for each in words for word in ("--set", each))
        return self.tfcluster("launch", *where, *settings, "--", *command)

    def tfcluster(self, *words: str) -> tuple[str, ...]:
        return (sys.executable, "-P", "-m", "tfcluster", *words)

    def cost(self, argv: Sequence[str], *, codes: Sequence[int] = (0,)) -> Cost:
        """Run it on the login host. Raises SystemExit with its output if it fails."""
        nodes, own = _cpu_s(self.rig.nodes), self._own_cpu_s()
        begin = perf_counter()
        done = self.rig.login.run(
            argv,
            user=USER,
            cwd=self.folder,
            env=self.environ,
            timeout_s=TIMEOUT_S,
        )
        elapsed = perf_counter() - begin
        if done.returncode not in codes:
            raise SystemExit(f"{argv} failed:\n{done.stdout[-2000:]}{done.stderr}")
        sleep(_END_S)
        return Cost(
            elapsed,
            max(0.0, self._own_cpu_s() - own),
            max(0.0, _cpu_s(self.rig.nodes) - nodes),
        )

    def start(self, argv: Sequence[str], output: Path) -> InsideProcess:
        login = Login(user=USER, cwd=self.folder, env=self.environ)
        with output.open("wb") as file:
            return self.rig.login.popen(argv, login=login, stdout=file)

    def _own_cpu_s(self) -> float:
        """CPU time of commands on the login host, and of processes they left there."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime + _cpu_s([self.rig.login])


def _cpu_s(hosts: Iterable[Host]) -> float:
    """CPU time of all processes on these hosts, including children that have ended."""
    spaces = {
        _space(Path("/proc", str(host.namespaces.pid)))
        for host in hosts
        if host.namespaces is not None
    }
    ticks = 0
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and _space(folder) in spaces:
                stat = (folder / "stat").read_text()
                ticks += sum(map(int, stat.rpartition(")")[2].split()[11:15]))
    return ticks / _TICKS


def _space(folder: Path) -> str:
    return str((folder / "ns" / "pid").readlink())


@contextlib.contextmanager
def bench(options: Options) -> Iterator[Bench]:
    """A rig with a folder to work in. Raises Unavailable if no rig is possible here."""
    with Testbed.up(options) as rig:
        folder = rig.accounts[USER].home / "bench"
        rig.login.output(("mkdir", "-m", "700", str(folder)), user=USER)
        yield Bench(rig, folder)
