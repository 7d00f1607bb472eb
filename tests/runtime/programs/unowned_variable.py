# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Sets a variable by its gradient; with ``optimizer`` as argument, by an optimizer."""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)
x = np.ones((32, 3), "float32")
weight = tf.Variable(tf.ones((3, 1)))
moved = tf.Variable(tf.zeros((3,)))
optimizer, other = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.2)


@tf.function
def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(((x + moved) @ weight - 1.0) ** 2)
    gradients = tape.gradient(loss, [weight, moved])
    optimizer.apply(gradients[:1], [weight])
    if "optimizer" in sys.argv:
        # They exchange it: when this is traced, it is not known whose variables these
        # are. One rank traces again, for the rows of a trial.
        other.apply(gradients[1:], [moved])
    else:
        moved.assign_add(gradients[1])


for batch in tf.data.Dataset.from_tensor_slices(x).batch(8):
    step(batch)
