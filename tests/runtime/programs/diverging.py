# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Ranks diverge in ways that are possible in a training loop: diverging.py WHAT."""

import os
import sys

import keras
import numpy as np
import tensorflow as tf

what = sys.argv[1]
odd = int(os.environ["TFCLUSTER_RANK"]) == int(os.environ["TFCLUSTER_SIZE"]) - 1
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="last")])
optimizer = keras.optimizers.Adam(0.1)
x = np.random.default_rng(1).normal(size=(24, 4)).astype("float32")


@tf.function
def step(rows):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(rows) ** 2)
    weights = model.trainable_variables
    optimizer.apply(tape.gradient(loss, weights), weights)


def train():
    for done, rows in enumerate(tf.data.Dataset.from_tensor_slices(x).batch(4)):
        step(rows)
        if what == "ends early" and odd and done == 3:
            return


train()
if odd and what == "assigns last":
    kernel, bias = model.get_weights()
    model.set_weights([kernel * 1.5, bias])
if odd and what == "sets a rate last":
    optimizer.learning_rate = 0.05
if what == "exits":
    sys.exit(0)
if what == "in a function":
    del model, optimizer, step
print("the end")
