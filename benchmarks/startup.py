"""The time from launch to exit of eight tasks that do nothing."""

from __future__ import annotations

from functools import partial

from benchmarks.measure import (
    Row,
    command,
    medians,
    mpirun,
    seconds,
    show,
    state,
    tfcluster,
)

TASKS = 8
REPEATS = 7


def main() -> None:
    nothing = command("true")
    launch = ("launch", "-n", str(TASKS), "--set", "runtime.strategy=none", "--")
    torchrun = (command("torchrun"), f"--nproc-per-node={TASKS}", "--no-python")
    with state() as env:
        found = medians(
            {
                "tfcluster": partial(seconds, tfcluster(*launch, nothing), env),
                "torchrun": partial(seconds, [*torchrun, nothing], env),
                "mpirun": partial(seconds, [*mpirun(TASKS), nothing], env),
            },
            REPEATS,
        )
    what = f"{TASKS} tasks that do nothing"
    show(
        "Start",
        [
            Row(what, found["tfcluster"], "torchrun", found["torchrun"], 0.20),
            Row(what, found["tfcluster"], "mpirun", found["mpirun"], None),
        ],
    )


if __name__ == "__main__":
    main()
