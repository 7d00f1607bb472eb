"""Times all-reduces of numpy arrays over MPI; started by mpirun."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from benchmarks.programs.reduce_times import report

WORLD = MPI.COMM_WORLD


def act(count: int) -> Callable[[], None]:
    ours, total = np.ones(count, np.float32), np.empty(count, np.float32)

    def run() -> None:
        WORLD.Allreduce(ours, total)

    run()
    assert (total == WORLD.size).all()
    return run


report(WORLD.rank, act, WORLD.Barrier)
