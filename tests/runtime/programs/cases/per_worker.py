# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""A script that divides its data itself; a single process uses all ranks' batches.

PARTS is the number of ranks of the distributed run.
"""

from __future__ import annotations

import os

import keras
import numpy as np
import tensorflow as tf

import tfcluster.runtime as tfc
from tests.runtime.programs.cases.tools import main, results

PARTS = int(os.environ["PARTS"])
BATCHES, ROWS = 10, 5


def own_part(array):
    """This rank's rows; in one process, batch b joins batch b of all ranks."""
    if tfc.size() == PARTS:
        array = array[tfc.rank() :][:1]
    return array.swapaxes(0, 1).reshape(-1, array.shape[-1])


def trained(loss, weighted=False):
    generator = np.random.default_rng(1)
    shape = (PARTS, BATCHES, ROWS)
    x = own_part(generator.normal(size=(*shape, 6)))
    y = own_part(generator.normal(size=(*shape, 1)))
    weights = own_part(generator.uniform(size=(*shape, 1)))[:, 0]
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.003), loss, metrics=["mae"])
    return results(
        model,
        model.fit(
            x,
            y,
            batch_size=ROWS * (PARTS if tfc.size() == 1 else 1),
            epochs=5,
            sample_weight=weights if weighted else None,
            shuffle=False,
            verbose=0,
        ),
    )


def case_per_worker():
    return trained("mse")


def case_per_worker_sum():
    return trained(keras.losses.MeanSquaredError(reduction="sum"))


def case_per_worker_weights():
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return trained(loss, weighted=True)


def case_per_worker_predicts():
    """Each rank predicts what it is given."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    x = np.random.default_rng(1).normal(size=(11, 6)).astype("float32")
    return {"predicted": model.predict(x, batch_size=ROWS, verbose=0)}


class Watches(keras.layers.Layer):
    """Counts its rows, and keeps a moving average of their mean."""

    def build(self, shape):
        self.seen = self.add_weight(name="seen", initializer="zeros", trainable=False)
        self.mean = self.add_weight(
            shape=(shape[-1],), name="mean", initializer="zeros", trainable=False
        )

    def call(self, x):
        self.seen.assign_add(tf.cast(tf.shape(x)[0], x.dtype))
        self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, 0))
        return x


def case_per_worker_state_in_a_loop():
    """The layer's state is that of all ranks' rows, not only of the chief's."""
    generator = np.random.default_rng(1)
    x = own_part(generator.normal(size=(PARTS, BATCHES, ROWS, 6))).astype("float32")
    # The 1 keeps the bias away from 0, where only its rounding would be compared.
    y = x.sum(1, keepdims=True) + 1
    layer = Watches()
    model = keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01)
    rows = ROWS * (PARTS if tfc.size() == 1 else 1)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )

    for _ in range(5):
        for batch in tf.data.Dataset.from_tensor_slices((x, y)).batch(rows):
            step(*batch)
    kept = {v.name: v.numpy() for v in layer.non_trainable_variables}
    return results(model) | kept


if __name__ == "__main__":
    main(globals())
