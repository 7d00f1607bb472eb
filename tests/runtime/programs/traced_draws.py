# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Trains, and prints how often the update was traced; the argument chooses the step."""

from __future__ import annotations

import json
import os
import random
import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(5)
DATA = np.random.default_rng(0)
X = DATA.normal(size=(64, 4)).astype("float32")
Y = DATA.normal(size=(64, 3)).astype("float32")


traces = 0
inner = keras.Model.compute_loss


def counted(model, *args, **kwargs):
    """Keras's own, so that nothing of the program is in the step."""
    global traces
    traces += tf.inside_function()
    return inner(model, *args, **kwargs)


counted.__module__ = inner.__module__
keras.Model.compute_loss = counted


class Noisy(keras.Model):
    """Its step draws ``noise`` once for each trace."""

    def __init__(self, noise):
        super().__init__()
        self.inner = keras.layers.Dense(3)
        self.noise = noise

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y = data
        noise = self.noise()
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x + noise, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"error": loss}


def loss_with_noise(y_true, y_pred):
    return keras.ops.mean((y_true - y_pred) ** 2 * np.random.uniform(1, 2), -1)


def plain(optimizer, loss="mse"):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile(optimizer, loss, metrics=["mae", keras.metrics.MeanSquaredError()])
    return model


def scaled():
    """The scale falls in the first steps, after it has been used once."""
    optimizer = keras.optimizers.SGD(0.01)
    scaled = keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=2)
    return plain(scaled)


def noisy(noise):
    model = Noisy(noise)
    model.compile("adam", "mse")
    return model


MODELS = {
    "plain": lambda: plain(keras.optimizers.Adam()),
    "scaled": scaled,
    "loss": lambda: plain("sgd", loss_with_noise),
    "numpy": lambda: noisy(np.random.normal),
    "python": lambda: noisy(random.random),
    "keras": lambda: noisy(lambda: keras.random.normal((1,))),
}

deed, file = sys.argv[1:]
model = MODELS[deed]()
history = model.fit(X, Y, batch_size=16, epochs=2, verbose=0).history
if os.environ.get("TFCLUSTER_RANK", "0") == "0":
    np.savez(file, *model.get_weights(), **history)
print(json.dumps({"traces": traces}))
