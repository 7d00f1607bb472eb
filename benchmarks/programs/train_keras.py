"""Trains a model with Keras and prints seconds for each step.

``argv[1]`` is the batch size. The model is an MLP of 10.0 M parameters, or, if ``argv``
contains ``cnn``, a CNN of 5.1 M, or with ``norms`` a CNN of 45,018 that normalises its
batches 20 times. ``argv`` may also contain ``steps=N``, the number of
steps in an epoch, and ``bare``: then the program also times a bare all-reduce of as
many numbers. Otherwise, it does not mention tfcluster.
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

from benchmarks.programs.epoch_clock import EpochClock

EPOCHS = 4

steps = next((int(w[6:]) for w in sys.argv if w.startswith("steps=")), 30)
batch = int(sys.argv[1])
rng = np.random.default_rng(0)
y = rng.integers(0, 10, batch * steps)
keras.utils.set_random_seed(1)
if "cnn" in sys.argv:
    shape: tuple[int, ...] = (32, 32, 3)
    layers: list[Any] = [
        keras.layers.Conv2D(filters, 3, strides, "same", activation="relu")
        for filters, strides in ((32, 1), (64, 2), (128, 2), (256, 2))
    ]
    layers += [keras.layers.Flatten(), keras.layers.Dense(1152, activation="relu")]
elif "norms" in sys.argv:
    shape, layers = (16, 16, 3), []
    for _ in range(20):
        layers += [
            keras.layers.Conv2D(16, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
        ]
    layers.append(keras.layers.GlobalAveragePooling2D())
else:
    shape = (784,)
    layers = [keras.layers.Dense(2048, activation="relu") for _ in range(3)]
x = rng.normal(size=(batch * steps, *shape)).astype("float32")
model = keras.Sequential([keras.Input(shape), *layers, keras.layers.Dense(10)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(0.01), loss)


clock = EpochClock(steps)
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
