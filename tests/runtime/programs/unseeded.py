# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Random numbers of a program that sets no seed, and of one that does."""

import json
import random
import sys

import keras
import numpy as np
import tensorflow as tf


def draw():
    return [
        random.random(),
        float(np.random.rand()),
        float(tf.random.uniform([])),
        float(keras.random.uniform([])),
        float(keras.layers.Dense(1).kernel_initializer((3, 1))[0][0]),
        int(next(iter(tf.data.Dataset.range(100_000).shuffle(100_000)))),
    ]


unseeded = draw()
keras.utils.set_random_seed(4)
print(json.dumps({"unseeded": unseeded, "seeded": draw()}), file=sys.stdout)
