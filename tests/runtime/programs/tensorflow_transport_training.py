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
from tfcluster.runtime import process_group
from tfcluster.runtime.collective import ReduceOp
from tfcluster.runtime.collective.transports.tensorflow import (
    transport as tensorflow_transport,
)
from tfcluster.runtime.collective.transports.tensorflow.collective_keys import (
    instance_key,
)

# Lets small arrays use the path that is meant for large ones.
tensorflow_transport._DIRECT_BYTES = 1 << 14

RANK = int(os.environ["TFCLUSTER_RANK"])
SIZE = int(os.environ["TFCLUSTER_SIZE"])
found: dict[str, Any] = {}


def carried():
    """The bytes sent by TensorFlow's collective ops that Python has called so far."""
    return (
        transport().carried_bytes if process_group.is_initialized() and SIZE > 1 else 0
    )


def transport() -> Any:
    return process_group.group()._transport


def keep(name, model, before):
    for number, value in enumerate(model.get_weights()):
        found[f"{name}/w{number}"] = value
    if SIZE > 1:
        found[f"{name}/carried"] = carried() - before


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
    before = carried()
    model.fit(x, y, batch_size=20, epochs=2, verbose=0)
    keep("mixed", model, before)


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
    before = carried()
    model.fit(x, y, batch_size=rows, epochs=2, shuffle=False, verbose=0)
    keep(name, model, before)


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

    before = carried()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    for number, (rows, labels) in enumerate(dataset.repeat(2)):
        again = RANK == 1 and number >= 3
        step(rows, labels, again)  # a new Python value causes a retrace
    keep("retraced", model, before)
    found["retraced/again"] = np.array(sum(traces))


def retraced_ops():
    """The same with an op in the graph; its keys do not depend on a counter."""
    from tfcluster.runtime.collective.transports.tensorflow import ops

    group = transport().devices

    def traced():
        @tf.function
        def step(value):
            first, second = (instance_key(["retraced", each]) for each in range(2))
            total = ops.all_reduce(value, group, first, ReduceOp.SUM, timeout_s=20)
            return ops.all_reduce(total * 2, group, second, ReduceOp.SUM, timeout_s=20)

        return step

    step = traced()
    values = []
    for number in range(6):
        if RANK == 1 and number == 3:
            step = traced()
            step.get_concrete_function(tf.TensorSpec([7], tf.float32))
        values.append(float(step(tf.fill([5000], float(RANK + number)))[0]))
    found["retraced_ops"] = np.array(values)
    # The same op works eagerly.
    key = instance_key(["eager"])
    own = tf.fill([5000], float(RANK + 1))
    total = ops.all_reduce(own, group, key, ReduceOp.SUM, timeout_s=20)
    found["eager"] = total.numpy()
    for hint in (ops.RING, "auto"):
        key = instance_key(["hint", hint])
        hinted = ops.Devices(group.key, group.size, group.own, hint)
        total = ops.all_reduce(own, hinted, key, ReduceOp.MAX, timeout_s=20)
        found[f"hint/{hint}"] = total.numpy()
    try:
        ops.all_reduce(tf.constant(["x"]), group, key, ReduceOp.SUM, timeout_s=20)
    except TypeError as error:
        found["refused"] = np.array(str(error))


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
    retraced_ops()
    gathered()
mixed_dtypes()
embedding("few_rows", 2, 3)
embedding("many_rows", 8, 40)
retraced()
np.savez(f"{sys.argv[1]}-{RANK}.npz", **found)
