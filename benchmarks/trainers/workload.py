"""What every trainer trains, measures and prints; without any framework."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BEGAN = "BENCH_BEGAN"
"""The environment variable with the time at which the command was started."""
OWN_CORES = "BENCH_CORES"
"""The environment variable with the number of cores that each rank has to itself."""
COUNTS, CATEGORIES, TABLE_ROWS = 13, 8, 20_000
"""The columns of the DLRM's input: numbers, and rows of tables of this height."""
WORDS, VOCABULARY = 48, 5_000


@dataclass(frozen=True, slots=True)
class Task:
    """The data of a model; ``make`` gets a generator and the number of rows."""

    title: str
    batch: int
    """The number of rows of a global batch, a multiple of 16."""
    classes: int
    make: Callable[[np.random.Generator, int], Array]
    optimizer: str = "sgd"
    """What trains it where a benchmark does not choose."""

    def rows(self, count: int) -> tuple[Array, Array]:
        """Inputs, float32 or int32, and labels, int64; of ``count`` rows."""
        labels = np.random.default_rng(1).integers(0, self.classes, count)
        return self.make(np.random.default_rng(0), count), labels


def _normal(*shape: int) -> Callable[[np.random.Generator, int], Array]:
    return lambda rng, count: rng.normal(size=(count, *shape)).astype("float32")


def _integers(limit: int, columns: int) -> Callable[[np.random.Generator, int], Array]:
    return lambda rng, count: rng.integers(0, limit, (count, columns)).astype("int32")


TASKS = {
    "mlp": Task("MLP, 10 M parameters", 64, 10, _normal(784)),
    "mlp_adam": Task("MLP, Adam", 64, 10, _normal(784), "adam"),
    "cnn": Task("CNN, 4 BatchNormalizations", 64, 10, _normal(32, 32, 3)),
    "cnn20": Task("CNN, 20 BatchNormalizations", 64, 10, _normal(32, 32, 3)),
    "cnn_dense": Task("CNN, 5 M parameters", 64, 10, _normal(32, 32, 3)),
    "lstm": Task("Embedding, LSTM", 64, 2, _integers(VOCABULARY, 40)),
    "transformer": Task("transformer, 2 blocks", 32, 10, _integers(VOCABULARY, WORDS)),
    "dlrm": Task(
        "DLRM, 8 embedding tables",
        256,
        2,
        _integers(TABLE_ROWS, COUNTS + CATEGORIES),
    ),
}
FILTERS = {
    "cnn_dense": [(32, 1), (64, 2), (128, 2), (256, 2)],
    "cnn": [(32, 1), (64, 2), (128, 2), (128, 1)],
    "cnn20": [
        *[(16, 2), *[(16, 1)] * 6],
        *[(32, 2), *[(32, 1)] * 6],
        *[(64, 2), *[(64, 1)] * 5],
    ],
}
"""The filters and strides of the convolutions."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and how long it is trained, from the command line."""

    model: str
    batch: int
    """The number of rows of a global batch."""
    steps: int
    """The number of steps in a block; a block's time is measured as a whole."""
    blocks: int
    """The number of blocks; the first is not measured."""
    optimizer: str

    def rows_of_rank(self, rank: int, size: int) -> tuple[Array, Array]:
        """The rank's part of the rows of a global batch."""
        x, y = TASKS[self.model].rows(self.batch)
        part = self.batch // size
        mine = slice(rank * part, (rank + 1) * part)
        return x[mine], y[mine]


def parse(argv: Sequence[str] | None = None) -> Workload:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=TASKS)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--optimizer", choices=("adam", "sgd"), default="adam")
    given = parser.parse_args(argv)
    if OWN_CORES in os.environ:
        _take_cores(int(os.environ[OWN_CORES]))
    batch = given.batch or TASKS[given.model].batch
    return Workload(given.model, batch, given.steps, given.blocks, given.optimizer)


def _take_cores(count: int) -> None:
    """Run on cores that no other rank uses, as if this host had no more of them."""
    rank = int(os.environ.get("TFCLUSTER_RANK") or os.environ.get("RANK") or 0)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(
        0, {cores[(rank * count + place) % len(cores)] for place in range(count)}
    )


def place() -> tuple[int, int]:
    """The rank of this process, and the number of ranks."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def train(load: Workload, run: Callable[[int], float], parameters: int) -> None:
    """Train and report. ``run`` trains some steps and returns the last loss.

    It must not return before the steps have been computed.
    """
    run(1)
    first_s = since_start()
    times = []
    for _ in range(load.blocks):
        begin = time.perf_counter()
        loss = run(load.steps)
        times.append((time.perf_counter() - begin) / load.steps)
    report(first_s, times, parameters, loss)


def since_start() -> float:
    """Seconds since the command was started that started all ranks."""
    return time.time() - float(os.environ.get(BEGAN, "0"))


def report(
    first_s: float, times: Sequence[float], parameters: int, loss: float
) -> None:
    """Print a line of JSON; ``times`` has the seconds of a step in each block."""
    result = {
        "step": statistics.median(times[1:]),
        "first": first_s,
        "memory": _peak_mib(),
        "parameters": parameters,
        "loss": loss,
    }
    print("TIMES", json.dumps(result), flush=True)


def _peak_mib() -> float:
    """The largest resident memory that this process has had, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    return int(status["VmHWM"].split()[0]) / 1024
