"""Trains an MLP with Keras and prints seconds for each step.

The program does not mention tfcluster. ``argv[1]`` is the width of the MLP, ``argv[2]``
the batch size, ``argv[3]`` the number of batches per epoch over all workers.
"""

from __future__ import annotations

import json
import os
import statistics
import sys

import keras
import numpy as np

from benchmarks.programs.epoch_clock import EpochClock

EPOCHS = 5

width, batch, steps = map(int, sys.argv[1:])
rng = np.random.default_rng(0)
x = rng.normal(size=(batch * steps, 784)).astype("float32")
y = rng.integers(0, 10, batch * steps)
keras.utils.set_random_seed(1)
layers = [keras.layers.Dense(width, activation="relu") for _ in range(3)]
model = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(0.01), loss)


clock = EpochClock(steps)
model.fit(
    x, y, batch_size=batch, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[clock]
)
if os.environ.get("TFCLUSTER_RANK", "0") == "0":
    found = {"step": statistics.median(clock.times[2:])}
    print("TIMES", json.dumps(found), flush=True)
