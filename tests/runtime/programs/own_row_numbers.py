# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""A loop that reads what its step returns, in the way that the argument names.

"in a step": the eager step of a model does.
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)
rows = np.linspace(-1, 1, 96, dtype="float32").reshape(32, 3)
data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :1] ** 2)).batch(8)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.1)
optimizer.build(model.trainable_variables)
inside = keras.metrics.Mean()
way = sys.argv[1]


def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    inside.update_state(loss)
    return {
        "loss": loss,
        "norm": tf.linalg.global_norm(gradients),
        "weight": tf.norm(model.trainable_variables[0]),
        "rate": tf.constant(0.1),
    }


if way != "eagerly":
    step = tf.function(step)

outside = keras.metrics.Mean()
kept, total, best = [], 0.0, np.inf
for number, (x, y) in enumerate(data):
    found = step(x, y)
    loss = found["loss"]
    if way == "converted":
        kept.append(float(loss))  # read
    elif way in ("printed", "eagerly"):
        print(f"step {number}: {loss:.3f}")  # read
    elif way == "added up":
        total += loss
    elif way == "decides" and loss < best:  # read
        best = loss
    elif way == "kept":
        kept.append(loss)
    elif way == "otherwise":
        outside.update_state(loss)
        print(found["norm"].numpy(), float(found["weight"]), float(found["rate"]))
        assert optimizer.iterations.numpy() == number + 1
if way == "added up":
    print("mean", float(total / 4))  # read
elif way == "kept":
    print("mean", np.mean(kept))  # read


class Averaged(keras.Model):
    """Reads its loss for an average, or only what is that of the whole batch."""

    def __init__(self):
        super().__init__(name="averaged")
        self.out = keras.layers.Dense(1)
        self.mean = keras.metrics.Mean()
        self.average = 1.0

    def call(self, x):
        return self.out(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            if way == "in a step":
                self.average = 0.9 * self.average + 0.1 * float(loss)  # step reads
            scaled = loss / self.average
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.mean.update_state(loss)
        if way == "otherwise":
            assert int(tf.shape(x)[0]) > 0
            norm = tf.linalg.global_norm(gradients)
            rate = float(self.optimizer.learning_rate)
            print("STEP", float(self.mean.result()), norm.numpy(), rate)
        return {"loss": loss, "mean": self.mean.result()}


if way in ("otherwise", "in a step"):
    keras.utils.set_random_seed(1)
    model = Averaged()
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    model.fit(rows, rows[:, :1] ** 2, batch_size=8, shuffle=False, verbose=0)
print("MEANS", inside.result().numpy(), outside.result().numpy())
