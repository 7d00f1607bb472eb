"""What recording costs: a small model on 2 ranks, whose step takes a few milliseconds.

In each run, every other epoch is recorded, so the ratio holds even if the machine's
speed changes.

    python -m benchmarks.trace [EPOCHS]
"""

from __future__ import annotations

import sys

from benchmarks.collective import PROGRAMS, said_by
from benchmarks.measure import HERE, Row, show, state, tfcluster

EPOCHS = 40
TARGET = 1.03


def main() -> None:
    epochs = sys.argv[1] if len(sys.argv) > 1 else str(EPOCHS)
    program = str(PROGRAMS / "train_traced.py")
    argv = tfcluster("launch", "--trace", "-n", "2", "--", "python", program, epochs)
    with state() as env:
        env |= {
            "PYTHONPATH": str(HERE.parent),
            "OMP_NUM_THREADS": "1",
            "TF_NUM_INTRAOP_THREADS": "1",
            "TF_NUM_INTEROP_THREADS": "1",
        }
        found = said_by(argv, env)
    row = Row("a recorded step", found["on"], "not recorded", found["off"], TARGET)
    show("A step with and without `--trace`, 2 ranks", [row])
    print(f"\nMedian of the ratios of successive epochs: {found['ratio']:.3f}")


if __name__ == "__main__":
    main()
