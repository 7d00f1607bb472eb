"""A model of the time of a step on many hosts, from costs measured on this machine.

Each host has one rank, which always has the same number of rows: more hosts train a
larger batch. ``docs/scaling.md`` explains the formulas.

    python -m benchmarks.scaling [--costs JSON] [--hosts 8 64 512] [--gbit 1 10 100]
        [--point 16]

Without ``--costs``, the costs are measured first, and printed in that form. ``--point``
trains on that many hosts, namespaces of this machine, and holds the model to it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.between_hosts import launch
from benchmarks.collective import KIB, MIB
from benchmarks.contenders import (
    BURST_KIB,
    CORES,
    PEERS,
    Layout,
    Place,
    Result,
    Rig,
    ThisMachine,
    outcome,
)
from benchmarks.measure import HERE, state
from benchmarks.overlap import HEADERS
from benchmarks.peers import head, row
from benchmarks.rigs import bench
from benchmarks.trainers.workload import TASKS
from tests.rigs.testbed import Options, Unavailable

MODEL = "mlp"
EXCHANGES = 5
"""How often a step of the model exchanges, as ``benchmarks.partition`` counts."""
SMALL, LARGE = 64 * KIB, 64 * MIB
"""Sizes of all-reduces whose times are latency, and CPU time, nearly alone. Vectors of
16 KiB and less take one hop."""
MANY = 8
"""So many hosts share the cores, to measure what a message to one more host costs."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a rank's step costs on a host of its own."""

    compute_s: float
    """A step without any exchange, with one core."""
    size: int
    """The bytes of the gradients."""
    exchanges: int
    """How many all-reduces these bytes are divided among."""
    latency_s: float
    """From a rank that has something small to send to the next one that has it."""
    message_s: float
    """CPU time to send a small part to one more rank, and to receive its part."""
    cpu_s_per_byte: float
    """CPU time for each byte that a rank sends, receives and adds up."""

    def on_shared_cores(self, ranks: int, cores: int) -> Costs:
        """The same, if more ranks than cores take turns on the cores.

        Then each rank's work takes ranks / cores times as long, and so does a hop,
        since the next rank has to wait for its turn.
        """
        times = max(1.0, ranks / cores)
        return dataclasses.replace(
            self,
            compute_s=self.compute_s * times,
            latency_s=self.latency_s * times,
            message_s=self.message_s * times,
            cpu_s_per_byte=self.cpu_s_per_byte * times,
        )


def transfer_s(costs: Costs, size: float, gbit: float) -> float:
    """Seconds to send and to add up bytes, which happen at the same time."""
    return max(size * HEADERS * 8 / (gbit * 1e9), size * costs.cpu_s_per_byte)


def direct_s(costs: Costs, hosts: int, gbit: float) -> float:
    """Seconds of a step's exchanges with every other host directly: two hops.

    In each of these, a rank has a message for every other rank.
    """
    if hosts == 1:
        return 0.0
    transfer = transfer_s(costs, 2 * (hosts - 1) / hosts * costs.size, gbit)
    more = 2 * (hosts - 2) * costs.message_s
    return transfer + costs.exchanges * (2 * costs.latency_s + more)


def ring_s(costs: Costs, hosts: int, gbit: float) -> float:
    """Seconds of a step's exchanges around a ring: 2 (N-1) hops of 1/N each."""
    hops = 2 * (hosts - 1)
    transfer = transfer_s(costs, hops / hosts * costs.size, gbit)
    return transfer + costs.exchanges * hops * costs.latency_s


def halving_s(costs: Costs, hosts: int, gbit: float) -> float:
    """Seconds with recursive halving, then doubling: as many bytes, 2 log2 N hops."""
    transfer = transfer_s(costs, 2 * (hosts - 1) / hosts * costs.size, gbit)
    return transfer + costs.exchanges * 2 * _rounds(hosts) * costs.latency_s


def doubling_s(costs: Costs, hosts: int, gbit: float) -> float:
    """Seconds with recursive doubling: log2 N hops of the whole vector."""
    hops = _rounds(hosts)
    transfer = transfer_s(costs, hops * costs.size, gbit)
    return transfer + costs.exchanges * hops * costs.latency_s


def tree_s(costs: Costs, hosts: int, gbit: float) -> float:
    """Seconds with a binomial tree: up and down again, 2 log2 N hops of the vector."""
    return 2 * doubling_s(costs, hosts, gbit)


def _rounds(hosts: int) -> int:
    return math.ceil(math.log2(hosts)) if hosts > 1 else 0


ALGORITHMS: dict[str, Callable[[Costs, int, float], float]] = {
    "direct": direct_s,
    "ring": ring_s,
    "halving and doubling": halving_s,
    "recursive doubling": doubling_s,
    "tree": tree_s,
}


def step_s(costs: Costs, exchange_s: float) -> tuple[float, float]:
    """The bounds of a step: if all of its exchange overlaps with it, and if none does.

    In seconds, the smaller one first.
    """
    return max(costs.compute_s, exchange_s), costs.compute_s + exchange_s


def rows(
    costs: Costs, hosts: Sequence[int], gbits: Sequence[float]
) -> list[tuple[str, ...]]:
    """The cells of the table: for each network, the exchanges, and the direct step."""
    table = []
    for count, gbit in itertools.product(hosts, gbits):
        times = [exchange(costs, count, gbit) for exchange in ALGORITHMS.values()]
        least_s, most_s = step_s(costs, times[0])
        table.append(
            (
                f"{count}",
                f"{gbit:g} Gbit/s",
                *(_ms(seconds) for seconds in times),
                f"{_ms(least_s)} to {_ms(most_s)}",
                f"{costs.compute_s / most_s:.2f} to {costs.compute_s / least_s:.2f}",
            )
        )
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def measured() -> Costs:
    """The costs on this machine, with two hosts whose cables have no limit.

    Raises SystemExit with the first line of an error, and Unavailable if there can be
    no hosts here.
    """
    with state() as env:
        env["PYTHONPATH"] = str(HERE.parent)
        alone = _trained(ThisMachine(env), "keras", Layout(1), TASKS[MODEL].batch)
    with bench(Options(nodes=MANY)) as site:
        times = launch(site, 2, 1, "reduce_tfcluster", sizes=(SMALL, LARGE))
        many = launch(site, MANY, 1, "reduce_tfcluster", sizes=(SMALL,))
    # Two hosts: there are two hops, and each rank sends as many bytes as there are.
    latency_s = times[SMALL] / 2
    # The cores are busy for all of the time, with one rank after the other.
    more_s = many[SMALL] * CORES / MANY - times[SMALL]
    return Costs(
        compute_s=alone.step_s,
        size=4 * alone.parameters,
        exchanges=EXCHANGES,
        latency_s=latency_s,
        message_s=max(0.0, more_s) / (2 * (MANY - 2)),
        cpu_s_per_byte=max(0.0, times[LARGE] - times[SMALL]) / LARGE,
    )


def show_point(costs: Costs, ranks: int, gbit: float) -> None:
    """Train on hosts that share this machine's cores; print the model's step beside it.

    Raises SystemExit and Unavailable as ``measured`` does.
    """
    with bench(Options(nodes=ranks)) as site:
        for host in site.rig.nodes:
            host.cable.limit(int(gbit * 1e6), BURST_KIB)
        batch = ranks * TASKS[MODEL].batch
        step = _trained(Rig(site), "tfcluster", Layout(ranks, gbit), batch).step_s
    shared = costs.on_shared_cores(ranks, CORES)
    least_s, most_s = step_s(shared, direct_s(shared, ranks, gbit))
    print(
        f"\n{ranks} ranks on {CORES} cores, {ranks / CORES:g} on each, with cables of "
        f"{gbit:g} Gbit/s: a step takes {_ms(step)}. The model says {_ms(least_s)} to "
        f"{_ms(most_s)}, with work that takes {ranks / CORES:g} times as long.",
        flush=True,
    )


def _trained(place: Place, name: str, layout: Layout, batch: int) -> Result:
    words = (MODEL, "--batch", str(batch), "--steps", "3", "--blocks", "3")
    with tempfile.TemporaryDirectory() as folder:
        result = outcome(place, PEERS[name], layout, words, Path(folder))
    if not isinstance(result, Result):
        raise SystemExit(f"{PEERS[name].title}: {result}")
    return result


def main(argv: Sequence[str] = ()) -> None:
    given = _parser().parse_args(argv)
    print(f"\n### A step of {TASKS[MODEL].title}, on many hosts, by a model\n")
    try:
        costs = Costs(**json.loads(given.costs)) if given.costs else measured()
        print(f"Costs: `{json.dumps(dataclasses.asdict(costs))}`\n")
        head("hosts", "network", *ALGORITHMS, "a step (direct)", "efficiency")
        for cells in rows(costs, given.hosts, given.gbit):
            row(cells)
        if given.point:
            show_point(costs, given.point, given.gbit[0])
    except Unavailable as error:
        print(f"not here: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling")
    parser.add_argument("--costs", help="what an earlier call printed")
    parser.add_argument("--hosts", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 10.0, 100.0])
    parser.add_argument("--point", type=int, help="a number of ranks to measure with")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
