"""tfcluster beside what a user would pick instead: one table of steps of training.

The peers are one process with all cores (Keras's ``fit``), MultiWorkerMirroredStrategy
with a loop of its own, Keras on JAX with ``DataParallel``, and PyTorch's DDP. All train
the same model on the same rows with Adam in float32, and each rank has as many threads
as there are cores for it. Hosts are namespaces that share this machine's cores, joined
by cables of a limited rate.

    python -m benchmarks.peers [--models mlp cnn ...] [--peers tfcluster ddp ...]
        [--ranks 1 2 4] [--hosts 2 4] [--host-models mlp cnn] [--gbit 1]
        [--steps 3] [--quick]

``--host-models`` are those of ``--models`` that are trained between hosts, too.
``--hosts`` without numbers leaves hosts out. ``--quick`` tries every cell with two
steps, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks.measure import HERE, state, tfcluster
from benchmarks.rigs import USER, Bench, bench
from benchmarks.trainers.workload import BEGAN, TASKS
from tests.rigs.testbed import Options, Unavailable
from tests.rigs.testbed.host import Login

TRAINERS = HERE / "trainers"
TIMEOUT_S = 180.0
BURST_KIB = 256
MODELS = ("mlp", "cnn", "lstm", "transformer", "dlrm")
BETWEEN_HOSTS = ("mlp", "cnn")
"""The models with the most bytes, and the most exchanges. Few, so that all of the table
takes a quarter of an hour."""
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
        return {name: str(self.threads(cores)) for name in names}

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
            statistics.median(each["step"] for each in reports),
            max(each["first"] for each in reports),
            max(each["memory"] for each in reports),
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
    texts = [each.read_text(errors="replace") for each in outputs if each.exists()]
    reports = [each for text in texts for each in reports_in(text)]
    if len(reports) == ranks:
        return Result.of(reports, layout.cores(CORES))
    if is_late:
        return f"no result after {TIMEOUT_S:.0f} s"
    return error_in(texts)


def _setting(name: str, value: str) -> tuple[str, str]:
    return "--set", f"env.{name}={value}"


def group_of(addresses: Sequence[str], ports: Sequence[int]) -> list[dict[str, str]]:
    """For each rank, the variables by which the peers' ranks meet."""
    workers = [f"{each}:{port}" for each, port in zip(addresses, ports, strict=False)]
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
        codes = [each.poll() for each in processes]
        if any(codes) or None not in codes:
            break
        time.sleep(0.05)
    is_late = time.monotonic() >= deadline
    for each in processes:
        if each.poll() is None:
            each.kill()
        each.wait()
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
    return f"failed: {last[0][:120] if last else 'without a word'}"


def places(found: Mapping[str, Outcome]) -> dict[str, str]:
    """For each peer, whether its step was the shortest, or how far it is behind."""
    steps = {name: r.step_s for name, r in found.items() if isinstance(r, Result)}
    if not steps:
        return {}
    first = min(steps, key=lambda name: steps[name])
    return {
        name: "**first**"
        if name == first
        else f"{step_s / steps[first]:.2f} times {PEERS[first].title}"
        for name, step_s in steps.items()
    }


def rows(
    model: str,
    layout: Layout,
    found: Mapping[str, Outcome],
    alone: Mapping[str, Outcome],
) -> Iterator[list[str]]:
    """The table's rows of one model in one place.

    ``alone`` are the outcomes of one rank with one core.
    """
    in_place = places(found)
    for name, result in found.items():
        title = PEERS[name].title
        if name == "keras" and layout.ranks > 1:
            title += ", all cores"
        cells = [TASKS[model].title, layout.title, title]
        if not isinstance(result, Result):
            yield [*cells, "", "", "", "", result]
            continue
        base = alone.get(name)
        share = result.efficiency(base) if isinstance(base, Result) else None
        yield [
            *cells,
            f"{result.step_s * 1e3:.1f} ms",
            f"{result.memory_mib:.0f} MiB",
            f"{result.first_s:.1f} s",
            "" if share is None else f"{share:.2f}",
            in_place[name],
        ]


HEADS = (
    *("model", "where", "what", "a step", "memory of a rank", "first step after"),
    *("efficiency", "place"),
)


def head(*cells: str) -> None:
    row(cells)
    row(["---"] * len(cells))


def row(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


@dataclass(slots=True)
class Table:
    """Measures cells, prints their rows, and counts places."""

    names: Sequence[str]
    words: Sequence[str]
    folder: Path
    found: dict[tuple[str, Layout], dict[str, Outcome]] = field(default_factory=dict)
    whole: dict[str, Outcome] = field(default_factory=dict)
    """By model, what one process with all cores takes."""

    def add(self, place: Place, model: str, layout: Layout) -> None:
        """Measure one model in one place with all peers, and print the rows.

        One process with all cores is measured once, and not compared with hosts.
        """
        outcomes: dict[str, Outcome] = {}
        for name in self.names:
            if name != "keras" or layout.ranks == 1:
                outcomes[name] = self._measured(place, name, model, layout)
            elif layout.gbit is None:
                whole = Layout(1, is_whole=True)
                if model not in self.whole:
                    self.whole[model] = self._measured(place, name, model, whole)
                outcomes[name] = self.whole[model]
        self.found[model, layout] = outcomes
        alone = self.found.get((model, Layout(1)), {})
        for cells in rows(model, layout, outcomes, alone):
            row(cells)

    def _measured(self, place: Place, name: str, model: str, layout: Layout) -> Outcome:
        words = (model, *self.words)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            return outcome(place, PEERS[name], layout, words, Path(folder))

    def summary(self) -> str:
        """In how many places tfcluster was first."""
        groups = [each for each in self.found.values() if len(each) > 1]
        measured = [
            each for each in groups if isinstance(each.get("tfcluster"), Result)
        ]
        first = sum(places(each)["tfcluster"] == "**first**" for each in measured)
        return f"tfcluster is first in {first} of {len(measured)} places."


def note(cores: int) -> str:
    return (
        f"{cores} cores. Efficiency: the time of one rank with one core, divided by "
        "the time here and the number of cores in use, which hosts share. The first "
        "step is counted from the start of the command. Ranks of tfcluster are forked "
        "from a process that has imported TensorFlow, and what they do not change of "
        "its memory does not count as theirs."
    )


def main(argv: Sequence[str] = ()) -> None:
    given = _parser().parse_args(argv)
    began = time.monotonic()
    steps = 2 if given.quick else given.steps
    blocks = 2 if given.quick else 4
    words = ("--steps", str(steps), "--blocks", str(blocks))
    print("\n### A step of training, beside the alternatives\n")
    with state() as env, tempfile.TemporaryDirectory() as folder:
        env["PYTHONPATH"] = str(HERE.parent)
        table = Table(given.peers, words, Path(folder))
        head(*HEADS)
        machine = ThisMachine(env)
        for model, ranks in itertools.product(given.models, given.ranks):
            table.add(machine, model, Layout(ranks))
        if given.hosts:
            models = [each for each in given.models if each in given.host_models]
            _between_hosts(table, models, given.hosts, given.gbit)
        minutes = (time.monotonic() - began) / 60
        print(f"\n{table.summary()} {note(CORES)} Measured in {minutes:.1f} minutes.")


def _between_hosts(
    table: Table, models: Sequence[str], hosts: Sequence[int], gbit: float
) -> None:
    try:
        with bench(Options(nodes=max(hosts))) as site:
            for host in site.rig.nodes:
                host.cable.limit(int(gbit * 1e6), BURST_KIB)
            for model, count in itertools.product(models, hosts):
                table.add(Rig(site), model, Layout(count, gbit))
    except Unavailable as error:
        print(f"\nNo hosts here: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers")
    parser.add_argument("--models", nargs="+", choices=TASKS, default=list(MODELS))
    parser.add_argument(
        "--host-models", nargs="+", choices=TASKS, default=list(BETWEEN_HOSTS)
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--hosts", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
