"""A step of training between hosts of a test rig whose cables have a limited rate.

It is compared with torch DDP over gloo, with the same step without exchange, and with
the time that the gradients need on the wire. Hosts are namespaces on this machine. Each
has its own part of the cores, while there are enough, and its own cable, limited in
both directions by ``tc qdisc tbf`` with a burst of 256 KiB.

    python -m benchmarks.overlap [--hosts 2 4] [--gbit 1 5] [--models mlp ...]
        [--only NAME ...] [--rounds 3] [--steps 10] [--phases]

``--phases`` shows how long a step exchanges, and how long it has nothing to send: from
the last sum, through the update and the next forward pass, to the next gradient. Steps
cannot be faster than the latter and the time on the wire together.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.contenders import BURST_KIB, PEERS, Layout, Peer, Result, Rig, outcome
from benchmarks.rigs import USER, Bench, bench
from benchmarks.trainers.workload import TASKS
from tests.rigs.testbed import Options, Unavailable

BATCH = 64
MODELS = ("mlp", "cnn_dense", "cnn20")
HEADERS = 1.05
"""Bytes on the wire for each byte of data: TCP, IP and Ethernet headers."""
WITHIN, COMPRESSED_WITHIN, OF_DDP = 1.04, 1.1, 0.92
"""Targets, as factors: of max(wire, computation), the same with compression, of DDP."""

COMPRESSION = ("bf16", "fp16")
ALONE = "no exchange"


def _launched(name: str, *setting: str) -> Peer:
    return Peer(name, "keras_fit", launch=("--set", *setting))


CONTENDERS = {
    "tfcluster": PEERS["tfcluster"],
    **{name: _launched(name, f"runtime.compression={name}") for name in COMPRESSION},
    "DDP": PEERS["ddp"],
    ALONE: _launched(ALONE, "runtime.strategy=none"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured together."""

    model: str
    hosts: int
    gbit: float

    def wire_s(self, parameters: int, bytes_per_number: int) -> float:
        """Seconds that a ring all-reduce of the gradients keeps a cable busy."""
        data = 2 * (self.hosts - 1) / self.hosts * parameters
        return data * bytes_per_number * 8 * HEADERS / (self.gbit * 1e9)


def result(
    site: Bench, case: Case, name: str, steps: int, trace: Path | None = None
) -> Result:
    """A run of a contender. Raises SystemExit with its error if it fails.

    ``trace`` is a file to write the run's trace to.
    """
    peer = CONTENDERS[name]
    if trace is not None and peer.launch is not None:
        peer = replace(peer, launch=("--trace", *peer.launch))
    batch = BATCH // case.hosts if name == ALONE else BATCH
    words = (case.model, "--batch", str(batch), "--steps", str(steps))
    with tempfile.TemporaryDirectory() as folder:
        trained = outcome(
            Rig(site),
            peer,
            Layout(case.hosts, case.gbit),
            (*words, "--optimizer", "sgd"),
            Path(folder),
        )
    if not isinstance(trained, Result):
        raise SystemExit(f"{name}: {trained}")
    if trace is not None:
        written = site.tfcluster("trace", "-o", str(trace))
        site.rig.login.run(written, user=USER, cwd=site.folder, env=site.environ)
    return trained


def phases(trace: Path) -> tuple[float, float]:
    """Seconds of a step in which rank 0 exchanges buckets, and in which it does not."""
    events = json.loads(trace.read_text())["traceEvents"]
    (rank_0,) = (
        event["pid"]
        for event in events
        if event["name"] == "process_name" and "worker:0" in event["args"]["name"]
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
) -> dict[str, Result]:
    """The medians over rounds; every contender runs once in each round."""
    for host in site.rig.nodes[: case.hosts]:
        host.cable.limit(int(case.gbit * 1e6), BURST_KIB)
    trials: dict[str, list[Result]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, several in trials.items():
            several.append(result(site, case, name, steps))
    return {
        name: replace(
            several[0], step_s=statistics.median(trial.step_s for trial in several)
        )
        for name, several in trials.items()
    }


def row(case: Case, name: str, results: Mapping[str, Result]) -> list[str]:
    """The cells of a contender: its time, its limit, and its target."""
    ours = results[name].step_s
    cells = [f"{TASKS[case.model].title}, {case.hosts} hosts, {case.gbit:g} Gbit/s"]
    cells += [name, f"{ours * 1e3:.0f} ms"]
    if name == ALONE:
        return [*cells, "", "", "", ""]
    wire_s = case.wire_s(results[name].parameters, 2 if name in COMPRESSION else 4)
    limit_s = max(wire_s, results[ALONE].step_s if ALONE in results else 0.0)
    cells += [f"{wire_s * 1e3:.0f} ms", f"**{ours / limit_s:.2f}**"]
    if name == "DDP":
        return [*cells, "", ""]
    cells.append(f"**{ours / results['DDP'].step_s:.2f}**" if "DDP" in results else "")
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
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument(
        "--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS)
    )
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
                        rounds, steps = chosen.rounds, chosen.steps
                        results = measure(site, case, chosen.only, rounds, steps)
                        for name in chosen.only:
                            cells = row(case, name, results)
                            print(f"| {' | '.join(cells)} |", flush=True)
                        if chosen.phases:
                            trace = site.folder / "trace.json"
                            result(site, case, "tfcluster", steps, trace)
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
