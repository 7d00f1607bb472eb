"""An epoch that waits for its input pipeline, on ranks that have a core each."""

from __future__ import annotations

import statistics
import sys

from benchmarks.collective import PROGRAMS, said_by
from benchmarks.measure import HERE, state, tfcluster

RANKS = 2
ROUNDS = 3
TARGET = 1.8
KINDS = {"JPEG images": (), "lines of text": ("strings",)}


def main() -> None:
    program = str(PROGRAMS / "train_images.py")
    launch = ("launch", "-n", str(RANKS), "--", "python", program)
    seconds: dict[tuple[str, str], list[float]] = {}
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
                    found = said_by(argv, env)
                    seconds.setdefault((kind, name), []).append(found["epoch"])
    print("\n### An epoch that waits for its input pipeline, one core per rank\n")
    print("| pipeline | what | an epoch | speed | target |")
    print("| --- | --- | --- | --- | --- |")
    for (kind, name), times in seconds.items():
        epoch_s = statistics.median(times)
        speed = statistics.median(seconds[kind, "one process"]) / epoch_s
        target = TARGET if name == f"{RANKS} ranks" else ""
        print(f"| {kind} | {name} | {epoch_s:.2f} s | **{speed:.2f}** | {target} |")


if __name__ == "__main__":
    main()
