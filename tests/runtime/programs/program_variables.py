# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Keeps state in tf.Variables of its own, in the way that the argument names.

fit            a queue of embeddings, on which the loss depends
loop           centres of classes, which are moved a little, likewise
summed         a sum of losses, on which nothing depends
eagerly        the queue, in steps without a graph
alike          a queue of all rows, averages of weights, a counter, a generator
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

import tfcluster.runtime as tfc

way = sys.argv[1]
keras.utils.set_random_seed(1)
rows = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((rows, rows * 0.9)).batch(16)


class Contrast(keras.Model):
    """Compares two views of a row with a queue of earlier rows."""

    def __init__(self):
        super().__init__()
        self.encoder, self.slow = (
            keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
            for _ in range(2)
        )
        self.slow.set_weights(self.encoder.get_weights())
        start = tf.math.l2_normalize(tf.random.normal((32, 4)), 1)
        self.queue = tf.Variable(start, trainable=False, name="queue")
        self.losses_so_far = tf.Variable(0.0, trainable=False, name="total")
        self.steps = tf.Variable(0, trainable=False, name="steps")
        self.generator = tf.random.Generator.from_seed(3)

    def train_step(self, batch):
        one, other = batch
        weights = self.encoder.trainable_variables
        with tf.GradientTape() as tape:
            found = tf.math.l2_normalize(self.encoder(one, training=True), 1)
            keys = tf.math.l2_normalize(self.slow(other, training=True), 1)
            close = tf.reduce_sum(found * keys, 1)
            away = tf.reduce_logsumexp(found @ tf.transpose(self.queue), 1)
            loss = tf.reduce_mean(away - close)
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.keep(loss, keys)
        return {"loss": loss}

    def keep(self, loss, keys):
        if way == "alike":
            for fast, slow in zip(self.encoder.weights, self.slow.weights, strict=True):
                slow.assign(0.9 * slow + 0.1 * fast)
            self.steps.assign_add(1)
            self.generator.normal([2])
            keys = tfc.gather_batch(keys)
        if way == "summed":
            self.losses_so_far.assign_add(loss)  # set
        elif way == "fit":
            self.queue.assign(tf.concat([keys, self.queue], 0)[:32])  # set
        elif way == "loop":
            classes = tf.cast(tf.reduce_sum(keys, 1) > 0, tf.int32)
            away = tf.gather(self.queue, classes) - keys
            self.queue.scatter_sub(tf.IndexedSlices(0.1 * away, classes))  # set
        else:
            kept = self.queue[:-16]
            self.queue[16:].assign(kept)  # set
            self.queue[: tf.shape(keys)[0]].assign(keys)


model = Contrast()
model.compile(keras.optimizers.SGD(0.05), run_eagerly=way == "eagerly")
if way == "loop":
    model.optimizer.build(model.encoder.trainable_variables)
    step = tf.function(model.train_step)
    for batch in data:
        step(batch)
else:
    model.fit(data, epochs=2, verbose=0)
print("weights", *np.concatenate([w.ravel() for w in model.get_weights()]))
print("queue", *model.queue.numpy().ravel())
