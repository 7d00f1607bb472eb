"""A step of training between hosts of a test rig whose cables have a limited rate.

It is compared with torch DDP over gloo, with the same step without exchange, and with
the time that the gradients need on the wire. Hosts are namespaces on this machine: they
share its cores, but each has its own cable, limited in both directions by ``tc qdisc
tbf`` with a burst of 256 KiB.

    python -m benchmarks.overlap [--hosts 2 4] [--gbit 1 5] [--models mlp cnn norms]
        [--only NAME ...] [--rounds 3] [--steps 10] [--phases]

``--phases`` shows how long a step exchanges, and how long it has nothing to send: from
the last sum, through the update and the next forward pass, to the next gradient. Steps
cannot be faster than the latter and the time on the wire together.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.collective import PROGRAMS, said_in
from benchmarks.rigs import TIMEOUT_S, USER, Bench, bench
from tests.rigs.testbed import Options, Unavailable

BATCH = 64
PARAMETERS = {"mlp": 10_020_874, "cnn": 5_121_162, "norms": 45_018}
"""By model; ``norms`` has 20 BatchNormalizations, and DDP has no equal of them."""
HEADERS = 1.05
"""Bytes on the wire for each byte of data: TCP, IP and Ethernet headers."""
BURST_KIB = 256
WITHIN, COMPRESSED_WITHIN, OF_DDP = 1.04, 1.1, 0.92
"""Targets, as factors: of max(wire, computation), the same with compression, of DDP."""

COMPRESSION = ("bf16", "fp16")
NAMES = ("tfcluster", *COMPRESSION, "DDP", "no exchange")


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured together."""

    model: str
    hosts: int
    gbit: float

    def wire_s(self, bytes_per_number: int) -> float:
        """Seconds that a ring all-reduce of the gradients keeps a cable busy."""
        data = 2 * (self.hosts - 1) / self.hosts * PARAMETERS[self.model]
        return data * bytes_per_number * 8 * HEADERS / (self.gbit * 1e9)


def step_s(
    site: Bench, case: Case, name: str, steps: int, trace: Path | None = None
) -> float:
    """Seconds for a step, as rank 0 prints them. Raises SystemExit if it prints none.

    ``trace`` is a file to write the run's trace to.
    """
    whole, part = str(BATCH), str(BATCH // case.hosts)
    none = "runtime.strategy=none"
    program, batch, more = {
        "tfcluster": ("train_keras", whole, ()),
        "bf16": ("train_keras", whole, ("runtime.compression=bf16",)),
        "fp16": ("train_keras", whole, ("runtime.compression=fp16",)),
        "DDP": ("train_ddp", whole, (none, "runtime.warm_start=false")),
        "no exchange": ("train_keras", part, (none,)),
    }[name]
    port = random.randrange(20000, 30000)
    settings = ("backend=ssh", "workdir=/", f"env.BENCH_PORT={port}", *more)
    argv = site.tfcluster(
        *("launch", *(["--trace"] if trace else [])),
        *("-n", str(case.hosts), "--hosts", site.hosts(case.hosts)),
        *(word for each in settings for word in ("--set", each)),
        *("--", "python", str(PROGRAMS / f"{program}.py"), batch, case.model),
        f"steps={steps}",
    )
    environ = {
        **site.environ,
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_NUM_INTEROP_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    done = site.rig.login.run(
        argv, user=USER, cwd=site.folder, env=environ, timeout_s=TIMEOUT_S
    )
    if trace is not None:
        written = site.tfcluster("trace", "-o", str(trace))
        site.rig.login.run(written, user=USER, cwd=site.folder, env=environ)
    return float(said_in(done.stdout + done.stderr, argv)["step"])


def phases(trace: Path) -> tuple[float, float]:
    """Seconds of a step in which rank 0 exchanges buckets, and in which it does not."""
    events = json.loads(trace.read_text())["traceEvents"]
    (rank_0,) = (
        each["pid"]
        for each in events
        if each["name"] == "process_name" and "worker:0" in each["args"]["name"]
    )
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == rank_0]
    steps = [e for e in spans if e["name"] == "step"]
    sends_s, computes_s = [], []
    for step in steps[len(steps) // 3 :]:
        end = step["ts"] + step["dur"]
        buckets = (e for e in spans if e["name"] == "bucket")
        busy = sum(e["dur"] for e in buckets if step["ts"] <= e["ts"] < end)
        sends_s.append(busy / 1e6)
        computes_s.append((step["dur"] - busy) / 1e6)
    return statistics.median(sends_s), statistics.median(computes_s)


def measure(
    site: Bench, case: Case, names: Sequence[str], rounds: int, steps: int
) -> dict[str, float]:
    """The medians over rounds; every contender runs once in each round."""
    for host in site.rig.nodes[: case.hosts]:
        host.cable.limit(int(case.gbit * 1e6), BURST_KIB)
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, several in found.items():
            several.append(step_s(site, case, name, steps))
    return {name: statistics.median(several) for name, several in found.items()}


def row(case: Case, name: str, found: Mapping[str, float]) -> list[str]:
    """The cells of a contender: its time, its limit, and its target."""
    ours, compute_s = found[name], found.get("no exchange", 0.0)
    cells = [f"{case.model}, {case.hosts} hosts, {case.gbit:g} Gbit/s", name]
    cells.append(f"{ours * 1e3:.0f} ms")
    if name == "no exchange":
        return [*cells, "", "", "", ""]
    wire_s = case.wire_s(2 if name in COMPRESSION else 4)
    limit_s = max(wire_s, compute_s)
    cells += [f"{wire_s * 1e3:.0f} ms", f"**{ours / limit_s:.2f}**"]
    if name == "DDP":
        return [*cells, "", ""]
    ddp_s = found.get("DDP")
    cells.append("" if ddp_s is None else f"**{ours / ddp_s:.2f}**")
    within = COMPRESSED_WITHIN if name in COMPRESSION else WITHIN
    cells.append(
        f"{within} of the limit"
        if name in COMPRESSION
        else f"{within} of the limit, or {OF_DDP} of DDP"
    )
    return cells


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 5.0])
    parser.add_argument("--models", nargs="+", default=list(PARAMETERS))
    parser.add_argument("--only", nargs="+", default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--phases", action="store_true")
    chosen = parser.parse_args(argv)
    print(f"\n### A step between hosts, global batch {BATCH}\n")
    heads = ("what", "", "a step", "wire", "times max(wire, no exchange)", "times DDP")
    print(f"| {' | '.join((*heads, 'target'))} |")
    print(f"| {' | '.join(['---'] * 7)} |")
    try:
        with bench(Options(nodes=max(chosen.hosts))) as site:
            for model in chosen.models:
                for hosts in chosen.hosts:
                    for gbit in chosen.gbit:
                        case = Case(model, hosts, gbit)
                        names = list(chosen.only)
                        if model == "norms" and "DDP" in names:
                            names.remove("DDP")
                        rounds, steps = chosen.rounds, chosen.steps
                        found = measure(site, case, names, rounds, steps)
                        for name in names:
                            cells = row(case, name, found)
                            print(f"| {' | '.join(cells)} |", flush=True)
                        if chosen.phases:
                            trace = site.folder / "trace.json"
                            step_s(site, case, "tfcluster", steps, trace)
                            sends_s, idle_s = phases(trace)
                            print(
                                f"| | buckets are exchanged for | {sends_s * 1e3:.0f} "
                                f"ms, not for {idle_s * 1e3:.0f} ms | | | | |",
                                flush=True,
                            )
    except Unavailable as error:
        print(f"not here: {error}")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
