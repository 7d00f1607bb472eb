"""Trains a transformer or a CNN with dropout; prints the seconds of a step.

``argv[1]`` is ``transformer`` or ``cnn``; with ``own`` as ``argv[2]``, ranks draw
random numbers without regard to their rows.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from typing import Any

import keras
import numpy as np

from benchmarks.programs.epoch_clock import EpochClock

STEPS, EPOCHS = 12, 4
WORDS, LENGTH, WIDTH = 5000, 64, 128


def transformer() -> tuple[keras.Model, Any, int]:
    """A text classifier with two blocks and 0.9 M parameters."""
    words = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, WIDTH)(words)
    for _ in range(2):
        found = keras.layers.MultiHeadAttention(4, WIDTH // 4, dropout=0.1)(x, x)
        x = keras.layers.LayerNormalization()(x + keras.layers.Dropout(0.1)(found))
        wide = keras.layers.Dense(4 * WIDTH, activation="gelu")(x)
        found = keras.layers.Dropout(0.1)(keras.layers.Dense(WIDTH)(wide))
        x = keras.layers.LayerNormalization()(x + found)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(words, keras.layers.Dense(10)(x)), (LENGTH,), 32


def cnn() -> tuple[keras.Model, Any, int]:
    """A classifier for images of 32 x 32 pixels, with six convolutions."""
    layers: list[Any] = [keras.Input((32, 32, 3))]
    for filters in (32, 64, 128):
        for _ in range(2):
            layers += [
                keras.layers.Conv2D(filters, 3, padding="same", use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.ReLU(),
            ]
        layers += [keras.layers.MaxPooling2D(), keras.layers.SpatialDropout2D(0.2)]
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([*layers, keras.layers.Dense(10)])
    return model, (32, 32, 3), 64


if "own" in sys.argv:
    from tfcluster.runtime.keras.random.drawn_rows import DrawnRows

    DrawnRows.part = lambda *args, **kwargs: None  # type: ignore[method-assign] # as without the hook
keras.utils.set_random_seed(1)
model, shape, batch = {"transformer": transformer, "cnn": cnn}[sys.argv[1]]()
rng = np.random.default_rng(0)
rows = batch * STEPS
x = (
    rng.integers(0, WORDS, (rows, *shape))
    if len(shape) == 1
    else rng.normal(size=(rows, *shape)).astype("float32")
)
y = rng.integers(0, 10, rows)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(0.01), loss)
clock = EpochClock(STEPS)
model.fit(
    x, y, batch_size=batch, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[clock]
)
if os.environ.get("TFCLUSTER_RANK", "0") == "0":
    found = {"step": statistics.median(clock.times[1:])}
    print("TIMES", json.dumps(found), flush=True)
