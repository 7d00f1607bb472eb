# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Trainings and calls over the tensorflow transport: results go to RESULTS-<rank>.npz.

    tensorflow_transport_training.py RESULTS

With one rank, the results are those of a single process.
"""

import faulthandler
import os
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfcluster.runtime as tfc

RANK = int(os.environ["TFCLUSTER_RANK"])
SIZE = int(os.environ["TFCLUSTER_SIZE"])
found: dict[str, Any] = {}


def keep(name, model):
    for number, value in enumerate(model.get_weights()):
        found[f"{name}/w{number}"] = value


def mixed_dtypes():
    keras.utils.set_random_seed(3)
    draw = np.random.default_rng(3)
    x = draw.normal(size=(60, 40))
    y = x @ draw.normal(size=(40, 1))
    model = keras.Sequential(
        [
            keras.Input((40,), dtype="float64"),
            keras.layers.Dense(150, activation="tanh", dtype="float64"),
            keras.layers.Dense(80, activation="tanh", dtype="float32"),
            keras.layers.Dense(40, activation="tanh", dtype="float64"),
            keras.layers.Dense(1, dtype="float32"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    model.fit(x, y, batch_size=20, epochs=2, verbose=0)
    keep("mixed", model)


def embedding(name, rows, words):
    """Train with ``rows`` per global batch and ``words`` lookups per row."""
    keras.utils.set_random_seed(4)
    draw = np.random.default_rng(4)
    x = draw.integers(0, 30, size=(24, words))
    y = draw.normal(size=(24, 1))
    model = keras.Sequential(
        [
            keras.Input((words,), dtype="int32"),
            keras.layers.Embedding(50, 200),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.5), "mse")
    model.fit(x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0)
    keep(name, model)


def retraced():
    """Rank 1 retraces its step in the middle of training."""
    keras.utils.set_random_seed(5)
    draw = np.random.default_rng(5)
    x = draw.normal(size=(60, 40)).astype("float32")
    y = (x @ draw.normal(size=(40, 1))).astype("float32")
    model = keras.Sequential([keras.Input((40,)), keras.layers.Dense(150)])
    model = keras.Sequential([model, keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.01)
    traces = []

    @tf.function
    def step(rows, labels, attempt):
        traces.append(attempt)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(rows) - labels) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(
            zip(tape.gradient(loss, variables), variables, strict=True)
        )
        return loss

    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    for number, (rows, labels) in enumerate(dataset.repeat(2)):
        again = RANK == 1 and number >= 3
        step(rows, labels, again)  # a new Python value causes a retrace
    keep("retraced", model)
    found["retraced/again"] = np.array(sum(traces))


def gathered():
    """Tensors of different sizes on each rank, along every axis."""
    for axis in range(4):
        shape = [30, 12, 7, 5]
        shape[axis] += 3 * RANK if RANK < 2 else -shape[axis]
        own = tf.reshape(tf.range(float(np.prod(shape))), shape) + 1000.0 * RANK
        eager = tfc.allgather(own, axis=axis)
        in_graph = tf.function(lambda x, a=axis: tfc.allgather(x, axis=a))(own)
        assert np.array_equal(eager.numpy(), in_graph.numpy())
        found[f"gathered/{axis}"] = eager.numpy()


# A rank that hangs shows its stack.
faulthandler.dump_traceback_later(120, exit=True)
if SIZE > 1:
    gathered()
mixed_dtypes()
embedding("few_rows", 2, 3)
embedding("many_rows", 8, 40)
retraced()
np.savez(f"{sys.argv[1]}-{RANK}.npz", **found)
