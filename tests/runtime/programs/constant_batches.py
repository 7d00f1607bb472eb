# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Trainings whose code assumes a constant batch size; the argument chooses one.

Each runs in a separate job: after one rank fails, another may still wait for it.
"""

from __future__ import annotations

import sys

import keras
import tensorflow as tf

from tests.runtime.programs.cases.tools import data


def batch_shape():
    """The model reshapes its activations to a constant number of rows."""
    inputs = keras.Input(batch_shape=(8, 6))
    rows = keras.layers.Lambda(lambda x: tf.reshape(x, (8, 3, 2)))(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(rows)))
    model.compile("sgd", "mse")
    x, y = data(40)
    model.fit(x, y[:, None], batch_size=8, verbose=0)


class Translating(keras.Sequential):
    """The initial hidden state has a constant number of rows."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            found = self(tf.concat([x, tf.zeros((8, 2))], 1), training=True)
            loss = tf.reduce_mean((found[:, 0] - tf.cast(y, tf.float32)) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def translating(**kwargs):
    model = Translating([keras.Input((8,)), keras.layers.Dense(1)])
    model.compile("sgd", **kwargs)
    x, y = data(40)
    model.fit(x, y, batch_size=8, verbose=0)


def constant_batch_in_a_step():
    translating()


def constant_batch_in_an_eager_step():
    translating(run_eagerly=True)


def constant_batch_in_a_loop():
    x, y = data(40)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.01)

    @tf.function
    def step(x, y, hidden):
        with tf.GradientTape() as tape:
            found = model(tf.concat([x, hidden], 1), training=True)
            loss = tf.reduce_mean((found[:, 0] - tf.cast(y, tf.float32)) ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    for batch in tf.data.Dataset.from_tensor_slices((x, y)).batch(8):
        step(*batch, tf.zeros((8, 2)))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
