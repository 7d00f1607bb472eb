"""The time until N TensorFlow workers on this machine have done a first all-reduce."""

from __future__ import annotations

import random
import sys
from functools import partial

from benchmarks.measure import (
    HERE,
    Row,
    medians,
    mpirun,
    seconds,
    show,
    state,
    tfcluster,
)

TARGETS = {2: None, 4: 0.5, 8: 0.3}
REPEATS = 3
THEIRS = str(HERE / "programs" / "first_allreduce.py")
OURS = str(HERE / "programs" / "own_allreduce.py")


def main() -> None:
    rows = []
    for count, target in TARGETS.items():
        launch = ("launch", "-n", str(count))
        none = ("--set", "runtime.strategy=none")
        ours = tfcluster(*launch, "--", "python", OURS)
        theirs = tfcluster(*launch, *none, "--", "python", THEIRS)
        alone = [*mpirun(count), sys.executable, THEIRS]
        with state() as env:
            env["BENCH_PORT"] = str(random.randrange(20000, 32000))
            found = medians(
                {
                    "theirs": partial(seconds, theirs, env),
                    "ours": partial(seconds, ours, env),
                    "mpirun": partial(seconds, alone, env),
                },
                REPEATS,
            )
        what = f"{count} workers, MultiWorkerMirroredStrategy"
        rows.append(Row(what, found["theirs"], "mpirun", found["mpirun"], target))
        what = f"{count} workers, tfcluster's all-reduce"
        rows.append(Row(what, found["ours"], "mpirun", found["mpirun"], target))
    show("First all-reduce", rows)


if __name__ == "__main__":
    main()
