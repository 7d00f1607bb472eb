"""Starts the ranks of a framework, here or on a rig, and reads their reports."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks.measure import HERE, tfcluster
from benchmarks.rigs import USER, Bench
from benchmarks.trainers.workload import BEGAN, OWN_CORES
from tests.rigs.testbed.host import Login

TRAINERS = HERE / "trainers"
TIMEOUT_S = 180.0
BURST_KIB = 256
CORES = os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Peer:
    """A framework: its name in the table, its program and its settings."""

    title: str
    program: str
    env: Mapping[str, str] = field(default_factory=dict)
    package: str = "tensorflow"
    """What must be installed."""
    launch: Sequence[str] | None = None
    """Options of ``tfcluster launch``; None: its ranks are started without it."""


PEERS = {
    "tfcluster": Peer("tfcluster", "keras_fit", launch=()),
    "keras": Peer("one process", "keras_fit"),
    "mirrored": Peer("MultiWorkerMirroredStrategy", "mirrored"),
    "jax": Peer("Keras on JAX", "jax_data_parallel", {"KERAS_BACKEND": "jax"}, "jax"),
    "ddp": Peer("PyTorch DDP", "torch_ddp", package="torch"),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the ranks run, and with how many threads."""

    ranks: int
    gbit: float | None = None
    """The rate of each host's cable; None: all ranks are on this machine."""
    is_whole: bool = False
    """Whether the only rank has all cores."""

    @property
    def title(self) -> str:
        if self.gbit is not None:
            return f"{self.ranks} hosts, {self.gbit:g} Gbit/s"
        return f"{self.ranks} ranks" if self.ranks > 1 else "1 rank, 1 core"

    def threads(self, cores: int) -> int:
        """The threads of a rank for the operations of its step."""
        if self.ranks == 1:
            return cores if self.is_whole else 1
        return max(1, cores // self.ranks)

    def variables(self, cores: int) -> dict[str, str]:
        """The variables that set the threads of TensorFlow, PyTorch and JAX."""
        names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "PJRT_NPROC")
        found = {name: str(self.threads(cores)) for name in names}
        is_alone = self.ranks == 1 and not self.is_whole
        if is_alone or self.gbit is not None:
            # Else TensorFlow would run operations side by side on two cores, and a host
            # would compute on the cores of one that waits for the network.
            found[OWN_CORES] = str(self.threads(cores))
        return found

    def cores(self, cores: int) -> int:
        """How many of the machine's cores the ranks can use."""
        return min(cores, self.ranks * self.threads(cores))


@dataclass(frozen=True, slots=True)
class Result:
    """The times and memory of a peer in one place."""

    step_s: float
    first_s: float
    """Seconds from the command's start to the end of the slowest rank's first step."""
    memory_mib: float
    """The largest peak of a rank's resident memory."""
    cores: int
    parameters: int

    @classmethod
    def of(cls, reports: Sequence[Mapping[str, float]], cores: int) -> Result:
        return cls(
            statistics.median(report["step"] for report in reports),
            max(report["first"] for report in reports),
            max(report["memory"] for report in reports),
            cores,
            int(reports[0]["parameters"]),
        )

    def efficiency(self, alone: Result) -> float:
        """The share of its cores' time that one rank with one core would need."""
        return alone.step_s / (self.step_s * self.cores)


Outcome = Result | str
"""A result, or the first line of an error."""


class Place(Protocol):
    """Hosts on which the ranks of a peer run."""

    def addresses(self, count: int) -> list[str]: ...

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], output: Path, rank: int
    ) -> subprocess.Popen[bytes]:
        """Start a rank."""

    def launch(
        self, ranks: int, words: Sequence[str], output: Path
    ) -> subprocess.Popen[bytes]:
        """Start ``tfcluster launch`` with these words for all ranks."""


@dataclass(frozen=True, slots=True)
class ThisMachine:
    environ: Mapping[str, str]

    def addresses(self, count: int) -> list[str]:
        return ["127.0.0.1"] * count

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], output: Path, rank: int
    ) -> subprocess.Popen[bytes]:
        with output.open("wb") as file:
            return subprocess.Popen(
                argv,
                env={**self.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def launch(
        self, ranks: int, words: Sequence[str], output: Path
    ) -> subprocess.Popen[bytes]:
        return self.start(tfcluster("launch", "-n", str(ranks), *words), {}, output, 0)


@dataclass(frozen=True, slots=True)
class Rig:
    """Hosts of a test rig, one rank on each."""

    site: Bench

    def addresses(self, count: int) -> list[str]:
        return [str(host.address) for host in self.site.rig.nodes[:count]]

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], output: Path, rank: int
    ) -> subprocess.Popen[bytes]:
        login = Login(user=USER, cwd=self.site.folder, env={**self.site.environ, **env})
        with output.open("wb") as file:
            return self.site.rig.nodes[rank].popen(argv, login=login, stdout=file)

    def launch(
        self, ranks: int, words: Sequence[str], output: Path
    ) -> subprocess.Popen[bytes]:
        where = ("-n", str(ranks), "--hosts", self.site.hosts(ranks))
        ssh = ("--set", "backend=ssh", "--set", "workdir=/")
        full = self.site.tfcluster("launch", *where, *ssh, *words)
        return self.site.start(full, output)


def outcome(
    place: Place, peer: Peer, layout: Layout, words: Sequence[str], folder: Path
) -> Outcome:
    """Train with a peer: all of its ranks, until they have ended or one has failed.

    ``words`` are the trainer's; ``folder`` is an empty one, for what the ranks print.
    """
    if importlib.util.find_spec(peer.package) is None:
        return f"not here: {peer.package} is not installed"
    env = {**peer.env, **layout.variables(CORES), BEGAN: str(time.time())}
    argv = (str(TRAINERS / f"{peer.program}.py"), *words)
    ranks = layout.ranks
    outputs = [folder / f"rank-{rank}" for rank in range(ranks)]
    if peer.launch is not None:
        options = [*peer.launch, *(w for k, v in env.items() for w in _setting(k, v))]
        full = (*options, "--", "python", *argv)
        processes = [place.launch(ranks, full, outputs[0])]
    else:
        ports = [random.randrange(20000, 30000) for _ in range(ranks + 1)]
        group = group_of(place.addresses(ranks), ports)
        processes = [
            place.start(
                (sys.executable, *argv), {**env, **group[rank]}, outputs[rank], rank
            )
            for rank in range(ranks)
        ]
    is_late = not wait(processes, TIMEOUT_S)
    texts = [
        output.read_text(errors="replace") for output in outputs if output.exists()
    ]
    reports = [report for text in texts for report in reports_in(text)]
    if len(reports) == ranks:
        return Result.of(reports, layout.cores(CORES))
    if is_late:
        return f"no result after {TIMEOUT_S:.0f} s"
    return error_in(texts)


def _setting(name: str, value: str) -> tuple[str, str]:
    return "--set", f"env.{name}={value}"


def group_of(addresses: Sequence[str], ports: Sequence[int]) -> list[dict[str, str]]:
    """For each rank, the variables by which the peers' ranks meet."""
    workers = [
        f"{address}:{port}" for address, port in zip(addresses, ports, strict=False)
    ]
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(addresses)),
            "MASTER_ADDR": addresses[0],
            "MASTER_PORT": str(ports[-1]),
            "TF_CONFIG": json.dumps(
                {
                    "cluster": {"worker": workers},
                    "task": {"type": "worker", "index": rank},
                }
            ),
        }
        for rank in range(len(addresses))
    ]


def wait(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> bool:
    """Wait until all have ended, or one has failed; then end the others.

    Returns whether this happened in time.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            break
        time.sleep(0.05)  # there is no event for the end of any of several processes
    is_late = time.monotonic() >= deadline
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
    return not is_late


def reports_in(output: str) -> Iterator[dict[str, float]]:
    """What ranks reported, among other lines of output."""
    for line in output.splitlines():
        if "TIMES " in line:
            yield json.loads(line.partition("TIMES ")[2])


def error_in(outputs: Iterable[str]) -> str:
    """The first line of the error that ended a rank, for a cell of the table."""
    for text in outputs:
        lines = re.findall(r"(\w+(?:Error|Exception): .*)", text)
        if lines:
            return str(lines[-1])[:120].replace("|", "/")
    last = [line for text in outputs for line in text.splitlines()[-1:]]
    return f"failed: {last[0][:120] if last else 'no output'}"
