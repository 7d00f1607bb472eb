# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Trains on rows moved along the gradient of a number that is no mean and no sum."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf


class Moving(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(1)

    def call(self, x):
        return self.out(x)

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            tape.watch(x)
            number = tf.sqrt(tf.reduce_mean(self(x) ** 2))
        x = x + tape.gradient(number, x)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


keras.utils.set_random_seed(1)
model = Moving()
model.compile("sgd", "mse")
x = np.ones((16, 3), "float32")
model.fit(x, x[:, :1], batch_size=8, verbose=0)
