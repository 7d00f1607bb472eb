"""Trains each model in ``argv`` and prints the seconds of its steps.

Also prints their CPU time, that of the first rank times the number of ranks.

With ``--xla``, XLA compiles them, with ``--no-xla`` it does not; else Keras decides.
"""

from __future__ import annotations

import json
import os
import statistics
import sys

import numpy as np

from benchmarks.programs.epoch_clock import EpochClock
from benchmarks.trainers.keras_models import with_batch

STEPS, EPOCHS = 8, 4
RANKS = int(os.environ.get("TFCLUSTER_SIZE", "1"))

xla: bool | str = "auto"
if {"--xla", "--no-xla"} & {*sys.argv}:
    xla = "--xla" in sys.argv
found = {}
for name in sys.argv[1:]:
    if name.startswith("--"):
        continue
    model, (x, y) = with_batch(name, xla)
    clock = EpochClock(STEPS)
    model.fit(
        np.concatenate([x] * STEPS),
        np.concatenate([y] * STEPS),
        batch_size=len(x),
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[clock],
    )
    found[name] = statistics.median(clock.times[1:])
    found[f"{name} cpu"] = RANKS * statistics.median(clock.cpu_times[1:])
if os.environ.get("TFCLUSTER_RANK", "0") == "0":
    print("TIMES", json.dumps(found), flush=True)
