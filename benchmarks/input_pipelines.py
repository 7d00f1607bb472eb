"""An epoch that waits for its input pipeline, on ranks that have a core each."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence

from benchmarks.collective import PROGRAMS, said_by
from benchmarks.measure import HERE, state, tfcluster

RANKS = 2
ROUNDS = 3
TARGET = 1.8
KINDS = {
    "JPEG images": (),
    "JPEG images, shuffled and scaled later": ("late",),
    "JPEG images, own loop": ("loop",),
    "lines of text": ("strings",),
}


def main() -> None:
    program = str(PROGRAMS / "train_images.py")
    launch = ("launch", "-n", str(RANKS), "--", "python", program)
    times: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    with state() as env:
        env |= {"PYTHONPATH": str(HERE.parent)}
        for _ in range(ROUNDS):
            for kind, words in KINDS.items():
                trials = {
                    "one process": [sys.executable, program, *words],
                    f"{RANKS} ranks": tfcluster(*launch, *words),
                    f"{RANKS} ranks, not divided": tfcluster(*launch, *words, "whole"),
                }
                for name, argv in trials.items():
                    times.setdefault((kind, name), []).append(said_by(argv, env))
    print("\n### An epoch that waits for its input pipeline, one core per rank\n")
    print("| pipeline | what | an epoch | speed | target | CPU of a rank | speed |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (kind, name), rounds in times.items():
        target = TARGET if name == f"{RANKS} ranks" else ""
        epoch_s, cpu_s = (_median(rounds, what) for what in ("epoch", "cpu"))
        alone = times[kind, "one process"]
        speed, of_cpu = _median(alone, "epoch") / epoch_s, _median(alone, "cpu") / cpu_s
        cells = (f"{epoch_s:.2f} s", f"**{speed:.2f}**", target, f"{cpu_s:.2f} s")
        print(f"| {kind} | {name} | {' | '.join(map(str, cells))} | {of_cpu:.2f} |")


def _median(rounds: Sequence[Mapping[str, float]], what: str) -> float:
    return statistics.median(found[what] for found in rounds)


if __name__ == "__main__":
    main()
