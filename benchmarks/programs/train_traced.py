"""Trains a small model and records every other epoch. Prints seconds for each step.

Each rank turns the recording on and off by itself, at the same epochs.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

import keras
import numpy as np

from tfcluster.runtime import process_group
from tfcluster.runtime.telemetry.tracer import tracer

STEPS, BATCH = 200, 64

epochs = int(sys.argv[1])
x = np.random.default_rng(0).normal(size=(BATCH * STEPS, 64)).astype("float32")
y = x.sum(1, keepdims=True)
keras.utils.set_random_seed(1)
layers = [keras.layers.Dense(256, activation="relu") for _ in range(3)]
model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(1)])
model.compile("adam", "mse")


class Turns(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Records every other epoch, and keeps the times of steps apart."""

    def __init__(self) -> None:
        super().__init__()
        self.times: dict[bool, list[float]] = {False: [], True: []}
        self._began = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        ours = tracer()
        assert ours is not None, "launch it with --trace"
        ours.on = epoch % 2 == 1
        process_group.group().tracer = ours if ours.on else None
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        seconds = (time.perf_counter() - self._began) / STEPS
        if epoch > 1:  # The first epochs trace and compile.
            self.times[epoch % 2 == 1].append(seconds)


turns = Turns()
options = {"shuffle": False, "verbose": 0, "callbacks": [turns]}
model.fit(x, y, batch_size=BATCH, epochs=epochs, **options)
if os.environ.get("TFCLUSTER_RANK", "0") == "0":
    off, on = (statistics.median(turns.times[key]) for key in (False, True))
    pairs = zip(turns.times[False], turns.times[True], strict=False)
    ratio = statistics.median(b / a for a, b in pairs)
    print("TIMES", json.dumps({"off": off, "on": on, "ratio": ratio}), flush=True)
