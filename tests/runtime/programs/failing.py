# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Trainings that must not succeed; the first argument chooses one."""

from __future__ import annotations

import os
import sys
import time

import keras
import numpy as np
import tensorflow as tf

RANK = int(os.environ.get("TFCLUSTER_RANK", "0"))
X = np.ones((12, 3), "float32")
Y = np.ones((12, 1), "float32")


def model_of(units=4):
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(units), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse")
    return model


def by_hand():
    """A train_step that changes the variables itself, by finite differences."""

    class ByHand(keras.Sequential):
        def train_step(self, data):
            x, y = data
            loss = tf.reduce_mean((self(x) - y) ** 2)
            for weight in self.trainable_variables:
                weight.assign_add(tf.fill(weight.shape, 1e-3))
                slope = (tf.reduce_mean((self(x) - y) ** 2) - loss) / 1e-3
                weight.assign_sub(tf.fill(weight.shape, 1e-3 + 0.01 * slope))
            return {"loss": loss}

    model = ByHand([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)


def second_model():
    """Train a model, and then one whose train_step changes its variables itself."""
    model_of().fit(X, Y, verbose=0)
    print("the first model was trained")
    by_hand()


def other_model():
    model_of(4 + RANK % 2).fit(X, Y, verbose=0)


def other_shapes():
    """A function is traced for batches of another shape on rank 1."""
    weight = tf.Variable(1.0)

    @tf.function
    def step(x):
        weight.assign_sub(0.1 * tf.reduce_sum(x) / x.shape[1])

    step(tf.ones((4, 3 + RANK % 2)))


def leaves():
    """Rank 1 trains for only one epoch."""
    model_of().fit(X, Y, epochs=1 if RANK == 1 else 3, verbose=0)


def never_trains():
    print("prediction", model_of().predict(X, verbose=0).shape)


if __name__ == "__main__":
    start = time.monotonic()
    try:
        globals()[sys.argv[1]]()
    finally:
        print(f"seconds {time.monotonic() - start:.1f}")
