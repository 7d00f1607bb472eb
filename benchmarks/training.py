"""The step time of an MLP of 10.0 M parameters, global batch 64, SGD, on two ranks."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence

from benchmarks.collective import PROGRAMS, said_by
from benchmarks.measure import HERE, command, state, tfcluster

BATCH = 64
RANKS = 2
ROUNDS = 3
TARGETS = {"torch DDP over gloo": 1.6, "MultiWorkerMirroredStrategy by hand": 3.0}
EXCHANGE = 2.0
"""The largest allowed cost of a step's exchange, in bare all-reduces of its size."""


def trials() -> dict[str, Sequence[str]]:
    def program(name: str, *more: str) -> list[str]:
        return [str(PROGRAMS / f"{name}.py"), *more]

    launch = ("launch", "-n", str(RANKS))
    none = ("--set", "runtime.strategy=none")
    torchrun = [command("torchrun"), f"--nproc-per-node={RANKS}", "--standalone"]
    whole, part = str(BATCH), str(BATCH // RANKS)
    return {
        "tfcluster": tfcluster(
            *launch, "--", "python", *program("train_keras", whole, "bare")
        ),
        "no exchange": tfcluster(
            *launch, *none, "--", "python", *program("train_keras", part)
        ),
        "one process": [sys.executable, *program("train_keras", whole)],
        "torch DDP over gloo": [*torchrun, *program("train_ddp", whole)],
        "MultiWorkerMirroredStrategy by hand": tfcluster(
            *launch, *none, "--", "python", *program("train_mirrored", whole)
        ),
    }


def measure(env: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """The medians over rounds; every contender runs once in each round."""
    rounds: dict[str, list[Mapping[str, float]]] = {}
    for _ in range(ROUNDS):
        for name, argv in trials().items():
            rounds.setdefault(name, []).append(said_by(argv, env))
    return {
        name: {
            what: statistics.median(found[what] for found in several)
            for what in several[0]
        }
        for name, several in rounds.items()
    }


def main() -> None:
    with state() as env:
        env |= {
            "PYTHONPATH": str(HERE.parent),
            "OMP_NUM_THREADS": "1",
            "TF_NUM_INTRAOP_THREADS": "1",
            "TF_NUM_INTEROP_THREADS": "1",
        }
        found = measure(env)
    ours = found["tfcluster"]["step"]
    print(f"\n### A step on {RANKS} ranks, 10.0 M parameters, global batch {BATCH}\n")
    print("| what | a step | times ours | target |")
    print("| --- | --- | --- | --- |")
    for name, times in found.items():
        target = TARGETS.get(name)
        cells = [
            name,
            f"{times['step'] * 1e3:.1f} ms",
            f"**{times['step'] / ours:.2f}**",
            "" if target is None else f"{target:.1f}",
        ]
        print(f"| {' | '.join(cells)} |")
    bare = found["tfcluster"]["bare"]
    added = ours - found["no exchange"]["step"]
    print(
        f"\nThe exchange adds {added * 1e3:.1f} ms to a step, a bare all-reduce of as "
        f"many numbers takes {bare * 1e3:.1f} ms: {added / bare:.2f} of it "
        f"(target: at most {EXCHANGE:.1f})."
    )


if __name__ == "__main__":
    main()
