"""What equality with one machine costs: random numbers and batch normalization.

Times a step of a transformer and of a CNN, each with dropout, on two ranks of this
machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from benchmarks.collective import PROGRAMS, said_by
from benchmarks.measure import HERE, state, tfcluster

RANKS = 2
ROUNDS = 5
MOST = 1.03
"""The largest permitted cost of the random numbers that one machine would draw."""


def trials(model: str) -> dict[str, list[str]]:
    """The commands to compare; the first one is what tfcluster does by default."""
    program = str(PROGRAMS / "train_whole_batch.py")
    launch = ["launch", "-n", str(RANKS)]
    found = {
        "as on one machine": tfcluster(*launch, "--", "python", program, model),
        "random numbers of each rank's own": tfcluster(
            *launch, "--", "python", program, model, "own"
        ),
    }
    if model == "cnn":
        local = ("--set", "runtime.batch_normalization=local")
        found["batch_normalization: local"] = tfcluster(
            *launch, *local, "--", "python", program, model
        )
    return found


def measure(model: str, env: Mapping[str, str]) -> dict[str, float]:
    """The medians, in seconds, of rounds in which every contender runs once."""
    rounds: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, argv in trials(model).items():
            rounds.setdefault(name, []).append(said_by(argv, env)["step"])
    return {name: statistics.median(times) for name, times in rounds.items()}


def main() -> None:
    print(f"\n### What equality costs: a step on {RANKS} ranks\n")
    print("| model | compared with | as on one machine | without | ratio | target |")
    print("| --- | --- | --- | --- | --- | --- |")
    with state() as env:
        env |= {
            "PYTHONPATH": str(HERE.parent),
            "TF_NUM_INTRAOP_THREADS": "1",
            "TF_NUM_INTEROP_THREADS": "1",
        }
        for model in ("transformer", "cnn"):
            (_, ours), *others = measure(model, env).items()
            for name, theirs in others:
                target = f"{MOST}" if name.startswith("random") else ""
                print(
                    f"| {model} | {name} | {ours * 1e3:.1f} ms | "
                    f"{theirs * 1e3:.1f} ms | **{ours / theirs:.2f}** | {target} |"
                )


if __name__ == "__main__":
    main()
