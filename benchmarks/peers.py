"""tfcluster beside what a user would pick instead: one table of steps of training.

The peers are one process with all cores (Keras's ``fit``), MultiWorkerMirroredStrategy
with a loop of its own, Keras on JAX with ``DataParallel``, and PyTorch's DDP. All train
the same model on the same rows with Adam in float32, and each rank has as many threads
as there are cores for it. Hosts are namespaces that share this machine's cores, joined
by cables of a limited rate.

    python -m benchmarks.peers [--models mlp cnn ...] [--peers tfcluster ddp ...]
        [--ranks 1 2 4] [--hosts 2 4] [--host-models mlp cnn] [--gbit 1]
        [--steps 10] [--quick]

Times are of blocks of ``--steps`` steps; ``fit`` begins an epoch with each.
``--host-models`` are those of ``--models`` that are trained between hosts, too.
``--hosts`` without numbers leaves hosts out. ``--quick`` tries every cell with two
steps, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.contenders import (
    BURST_KIB,
    CORES,
    PEERS,
    Layout,
    Outcome,
    Place,
    Result,
    Rig,
    ThisMachine,
    outcome,
)
from benchmarks.measure import HERE, state
from benchmarks.rigs import bench
from benchmarks.trainers.workload import TASKS
from tests.rigs.testbed import Options, Unavailable

MODELS = ("mlp", "cnn", "lstm", "transformer", "dlrm")
BETWEEN_HOSTS = ("mlp", "cnn")
"""The models with the most bytes, and the most exchanges. Few, so that all of the table
takes a quarter of an hour."""


def places(outcomes: Mapping[str, Outcome]) -> dict[str, str]:
    """For each peer, whether its step was the shortest, or how far it is behind."""
    steps = {name: r.step_s for name, r in outcomes.items() if isinstance(r, Result)}
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
    outcomes: Mapping[str, Outcome],
    alone: Mapping[str, Outcome],
) -> Iterator[list[str]]:
    """The table's rows of one model in one place.

    ``alone`` are the outcomes of one rank with one core.
    """
    in_place = places(outcomes)
    for name, result in outcomes.items():
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
    outcomes: dict[tuple[str, Layout], dict[str, Outcome]] = field(default_factory=dict)
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
        self.outcomes[model, layout] = outcomes
        alone = self.outcomes.get((model, Layout(1)), {})
        for cells in rows(model, layout, outcomes, alone):
            row(cells)

    def _measured(self, place: Place, name: str, model: str, layout: Layout) -> Outcome:
        words = (model, *self.words)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            return outcome(place, PEERS[name], layout, words, Path(folder))

    def summary(self) -> str:
        """In how many places tfcluster was first."""
        groups = [group for group in self.outcomes.values() if len(group) > 1]
        measured = [
            group for group in groups if isinstance(group.get("tfcluster"), Result)
        ]
        first = sum(places(group)["tfcluster"] == "**first**" for group in measured)
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
            models = [model for model in given.models if model in given.host_models]
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
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--quick", action="store_true")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
