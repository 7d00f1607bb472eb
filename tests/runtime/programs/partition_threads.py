# Written like a user script: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls
"""A gradient that another thread computes: RESULTS gets it, as RESULTS-<rank>.npz."""

import os
import sys
import threading

import keras  # noqa: F401  # The ranks divide functions once it is imported.
import numpy as np
import tensorflow as tf

x = tf.constant(np.random.RandomState(0).rand(8, 6).astype("float32"))
weights = tf.Variable(np.ones((6, 3), "float32"))
function = tf.function(lambda batch: tf.tanh(tf.matmul(batch, weights)))
with tf.GradientTape() as tape:
    loss = tf.reduce_mean(function(x) ** 2)
found: list[tf.Tensor] = []
thread = threading.Thread(target=lambda: found.append(tape.gradient(loss, weights)))
thread.start()
thread.join()
rank = os.environ.get("TFCLUSTER_RANK", "0")
np.savez(f"{sys.argv[1]}-{rank}.npz", gradient=found[0].numpy())
