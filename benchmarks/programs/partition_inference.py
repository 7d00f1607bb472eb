"""Prints the seconds of ``evaluate`` and ``predict``; each process has one core."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

rank = int(os.environ.get("TFCLUSTER_RANK", "0"))
core = sorted(os.sched_getaffinity(0))[rank]
# A kept interpreter has threads already.
for thread in Path("/proc/self/task").iterdir():
    os.sched_setaffinity(int(thread.name), {core})

import numpy as np  # noqa: E402

from benchmarks.trainers.keras_models import with_batch  # noqa: E402

BATCHES, ROUNDS = 12, 4

model, (x, y) = with_batch(sys.argv[1])
x, y = np.concatenate([x] * BATCHES), np.concatenate([y] * BATCHES)
batch = len(x) // BATCHES
times: dict[str, list[float]] = {"evaluate": [], "predict": []}
for _ in range(ROUNDS):
    begin = time.perf_counter()
    model.evaluate(x, y, batch_size=batch, verbose=0)
    times["evaluate"].append(time.perf_counter() - begin)
    begin = time.perf_counter()
    model.predict(x, batch_size=batch, verbose=0)
    times["predict"].append(time.perf_counter() - begin)
if rank == 0:
    # The first calls trace.
    found = {name: statistics.median(each[1:]) for name, each in times.items()}
    print("TIMES", json.dumps(found), flush=True)
