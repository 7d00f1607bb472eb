# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Programs that change what the parameter servers hold, in all kinds of ways.

ps_assigned.py RESULTS
"""

from __future__ import annotations

import sys

import keras
import numpy as np
import tensorflow as tf

from tests.runtime.programs.cases.tools import RANK, data

LOSS = keras.losses.MeanSquaredError()


def dense():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])


def batches():
    x, y = data(rows=64)
    y = np.asarray(y, "float32")[:, None]
    return [(x[i : i + 16], y[i : i + 16]) for i in range(0, 64, 16)]


def case_eagerly():
    model, optimizer = dense(), keras.optimizers.SGD(0.1, momentum=0.9)
    for number, (x, y) in enumerate(batches() * 2):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        if number == 2:
            optimizer.learning_rate = 0.01
        if number == 3:
            kernel = model.trainable_variables[0].value
            kernel.assign(kernel * 0.5)
        if number == 4:
            for variable in optimizer.variables[2:]:
                variable.assign(tf.zeros_like(variable))
    return model.get_weights()


def case_in_graphs():
    model, optimizer = dense(), keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        for variable in model.trainable_variables:
            variable.assign(tf.clip_by_value(variable, -0.3, 0.3))
        optimizer.learning_rate.assign(optimizer.learning_rate * 0.9)

    @tf.function
    def forget():
        for variable in optimizer.variables[2:]:
            variable.assign(tf.zeros_like(variable))

    for number, (x, y) in enumerate(batches() * 2):
        step(x, y)
        if number == 4:
            forget()
    return [*model.get_weights(), optimizer.learning_rate.numpy()]


def case_of_tensorflow():
    """Two optimizers of plain variables, in a function that XLA was to compile."""
    kernel, bias = tf.Variable(tf.ones((6, 3))), tf.Variable(tf.zeros((3,)))
    adam, sgd = keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.001)

    @tf.function(jit_compile=True)
    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum((x @ kernel + bias - y) ** 2)
        adam.apply_gradients([(tape.gradient(loss, kernel), kernel)])
        sgd.apply_gradients([(tape.gradient(loss, bias), bias)])
        bias.assign_add(bias * 0.1)

    for x, y in batches():
        step(tf.constant(x), tf.constant(y))
        kernel.assign(kernel * 0.9)
    return [kernel.numpy(), bias.numpy()]


def case_rows():
    """A table of which only rows are exchanged."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(50, 5),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.5), LOSS)
    ids = np.random.default_rng(0).integers(0, 50, (64, 4))
    y = np.asarray(data(rows=64)[1], "float32")[:, None]
    for _ in range(2):
        model.fit(ids, y, batch_size=20, verbose=0)
        table = model.layers[0].embeddings
        table.assign(table * 1.5)
    return model.get_weights()


def main(path):
    found = {
        f"{name[5:]}/w{index}": value
        for name, case in list(globals().items())
        if name.startswith("case_")
        for index, value in enumerate(case())
    }
    np.savez(f"{path}-{RANK}.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
