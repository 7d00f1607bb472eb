"""The overhead of record and console for a program that logs 10,000 lines a second."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.measure import HERE, Row, medians, seconds, show, state, tfcluster

REPEATS = 5


def main() -> None:
    program = str(HERE / "programs" / "chatty.py")
    with state() as env, tempfile.TemporaryDirectory() as folder:
        marks = Path(folder) / "marks"
        env["BENCH_MARKS"] = str(marks)

        def elapsed(argv: list[str]) -> float:
            seconds(argv, env)
            return float(marks.read_text().split()[-1])

        # Unbuffered like the task, so that the only difference is record and console.
        bare = [sys.executable, "-u", program]
        elapsed(bare)
        env["BENCH_ROUNDS"] = marks.read_text().split()[0]
        quiet = ("--set", "runtime.strategy=none")
        found = medians(
            {
                "bare": lambda: elapsed(bare),
                "tfcluster": lambda: elapsed(
                    tfcluster("launch", "-n", "1", *quiet, "--", "python", program)
                ),
            },
            REPEATS,
        )
    what = "60,000 lines at 10,000 a second, 1 task"
    show("Chatter", [Row(what, found["tfcluster"], "a pipe", found["bare"], 1.05)])


if __name__ == "__main__":
    main()
