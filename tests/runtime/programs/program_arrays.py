# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""A step that gets arrays beside the batch, as the argument names them.

function       noise of numpy, in a step that is a tf.function
constant       noise of Python's generator, made a tensor
eagerly        noise of numpy's own generator, in a step without a graph
fit            noise of numpy, in a train_step without a graph
alike          numbers of the rows, of TensorFlow's generators, and counts of rows
"""

from __future__ import annotations

import random
import sys

import keras
import numpy as np
import tensorflow as tf

way = sys.argv[1]
keras.utils.set_random_seed(1)
generator = np.random.default_rng(0)
rows = generator.normal(size=(104, 6)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices(rows).batch(16)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6)])
optimizer = keras.optimizers.SGD(0.05)


def noise(batch):
    shape = len(batch), 6
    if way in ("function", "fit"):
        return np.random.normal(size=shape).astype("float32")
    if way == "constant":
        return tf.constant([[random.random()] * 6 for _ in batch])
    if way == "eagerly":
        return generator.normal(size=shape).astype("float32")
    return tf.random.normal(shape) + np.sin(batch.numpy())


def step(batch, added, places):
    with tf.GradientTape() as tape:
        outputs = model(batch + added if way == "eagerly" else batch)
        outputs = model(added) + outputs if way == "eagerly" else outputs + added
        loss = tf.reduce_mean(tf.square(outputs - 0 * places))
    weights = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))


class Model(keras.Sequential):
    def train_step(self, batch):
        added = noise(batch)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(batch + added) - self(added)))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


if way == "fit":
    model = Model(model.layers)
    model.compile(optimizer, run_eagerly=True)
    model.fit(rows, batch_size=16, epochs=2, verbose=0)
run = step if way == "eagerly" else tf.function(step)
for _ in range(2):
    for batch in dataset:
        places = np.arange(len(batch), dtype="float32")[:, None]
        run(batch, noise(batch), places)  # gets
print("weights", *(float(value) for value in model.get_weights()[0].reshape(-1)))
