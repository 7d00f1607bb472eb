# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""A regression that combines its own gradients, or divides its own data."""

import sys

import keras
import numpy as np
import tensorflow as tf

import tfcluster.runtime as tfc
from tests.runtime.programs.library_of_late_claims import combined

tfc.init()
how, mode, file = sys.argv[1:]
X = np.random.default_rng(7).normal(size=(48, 3)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((X, X.sum(1, keepdims=True)))
if how == "own":
    data = data.shard(tfc.size(), tfc.rank()).batch(12 // tfc.size())
elif how == "part":
    data = data.shard(tfc.size(), tfc.rank()).batch(12)
else:
    data = data.batch(12)
keras.utils.set_random_seed(1)
variables = [tf.Variable([[1.0], [2.0], [3.0]]), tf.Variable([0.5])]
optimizer = keras.optimizers.SGD(0.1)
rows = set()


def loss_of(x, y):
    return tf.reduce_mean((x @ variables[0] + variables[1] - y) ** 2)


def step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(x, y)
    gradients = tape.gradient(loss, variables)
    if how == "own":
        gradients = combined(gradients)
        gradients, _ = tf.clip_by_global_norm(gradients, 10.0)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return tfc.allreduce(loss) if how == "printed" else loss


class Model(keras.Sequential):
    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = combined(gradients) if how == "own" else gradients
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


try:
    if mode == "fit":
        model = Model([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd")
        model.fit(data, verbose=0)
    else:
        act = tf.function(step) if mode == "function" else step
        for _ in range(3):
            for batch in data:
                rows.add(int(batch[0].shape[0]))
                act(*batch)
        print("fewest rows", min(rows))
        np.savez(f"{file}-{tfc.rank()}.npz", *(v.numpy() for v in variables))
except tfc.CollectiveError as error:
    print(f"{type(error).__name__}: {error}")
