"""Where an all-reduce on one host spends its time; each row includes the rows above."""

from __future__ import annotations

import json
import statistics

from benchmarks.collective import KIB, MIB, PROGRAMS, said_by, words
from benchmarks.measure import HERE, state, tfcluster

SIZES = [4 * KIB, MIB, 16 * MIB]
COUNT = 2
ROUNDS = 3


def main() -> None:
    program = [str(PROGRAMS / "reduce_parts.py"), json.dumps(SIZES)]
    with state() as env:
        env |= {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
        env["TF_NUM_INTRAOP_THREADS"] = "1"
        argv = tfcluster("launch", "-n", str(COUNT), "--", "python", *program)
        rounds = [said_by(argv, env) for _ in range(ROUNDS)]
    print(f"\n### What an all-reduce consists of, N = {COUNT} ranks on one host\n")
    print(f"| | {' | '.join(map(words, SIZES))} |")
    print(f"| {' | '.join(['---'] * (1 + len(SIZES)))} |")
    for part in rounds[0][str(SIZES[0])]:
        cells = [
            statistics.median(found[str(size)][part] for found in rounds)
            for size in SIZES
        ]
        print(f"| {part} | {' | '.join(f'{s * 1e3:.3f} ms' for s in cells)} |")


if __name__ == "__main__":
    main()
