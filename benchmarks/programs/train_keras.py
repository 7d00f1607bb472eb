"""Trains an MLP of 10.0 M parameters with Keras and prints seconds for each step.

``argv[1]`` is the batch size. The program does not mention tfcluster, except to time a
bare all-reduce of as many numbers if ``argv`` contains ``bare``.
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

STEPS, EPOCHS = 30, 4

batch = int(sys.argv[1])
rng = np.random.default_rng(0)
x = rng.normal(size=(batch * STEPS, 784)).astype("float32")
y = rng.integers(0, 10, batch * STEPS)
keras.utils.set_random_seed(1)
layers = [keras.layers.Dense(2048, activation="relu") for _ in range(3)]
model = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(0.01), loss)


class Clock(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []
        self.began = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.times.append((time.perf_counter() - self.began) / STEPS)


clock = Clock()
model.fit(
    x, y, batch_size=batch, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[clock]
)
found = {"step": statistics.median(clock.times[1:])}
if "bare" in sys.argv:
    import tensorflow as tf

    import tfcluster.runtime as tfc

    tensor = tf.zeros([model.count_params()])
    times = []
    for _ in range(20):
        tfc.barrier()
        begin = time.perf_counter()
        tfc.allreduce(tensor)
        times.append(time.perf_counter() - begin)
    found["bare"] = statistics.median(times[3:])
if os.environ.get("TFCLUSTER_RANK", "0") == "0":
    print("TIMES", json.dumps(found), flush=True)
