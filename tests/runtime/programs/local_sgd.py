# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Trainings under ``strategy: local_sgd``: RESULTS [CASE...], as in ``cases/tools.py``.

Each rank saves its results, which include weights between averagings.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.runtime.programs.cases.tools import classifier, compiled, data, main, results
from tfcluster.runtime import process_group


def sgd(rate=0.1):
    return keras.optimizers.SGD(rate)


def local(model):
    """This rank's own weights, read in a way that does not cause an averaging."""
    return np.concatenate([w.value.numpy().reshape(-1) for w in model.weights])


class Watch(keras.callbacks.Callback):
    """Records a rank's own weights after every step."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(local(self.model))


def case_fit():
    """Four steps per epoch; the last batch has five rows."""
    x, y = data()
    watch = Watch()
    model = compiled(classifier(), sgd())
    history = model.fit(x, y, batch_size=15, epochs=3, shuffle=False, callbacks=[watch])
    after = local(model)
    return {
        **results(model, history),
        "steps": np.array(watch.steps),
        "after": after,
    }


def case_many_weights():
    """Counts the bytes that a rank sends, on ranks that share no memory."""
    x, y = data(96)
    model = compiled(
        keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(20000), keras.layers.Dense(2)]
        ),
        sgd(0.001),
        loss="mse",
        metrics=[],
    )
    transport: Any = process_group.group()._transport
    model.fit(x, keras.utils.to_categorical(y), batch_size=12, verbose=0)
    before = transport.sent_bytes
    model.fit(x, keras.utils.to_categorical(y), batch_size=12, epochs=12, verbose=0)
    return {"sent": np.array(transport.sent_bytes - before)}


def case_looked_at():
    """Evaluation, saving and backup between averagings."""
    x, y = data()
    model = compiled(classifier(), keras.optimizers.Adam(0.05))
    backup = keras.callbacks.BackupAndRestore("backup", save_freq=2)
    checkpoint = keras.callbacks.ModelCheckpoint("best.keras", monitor="loss")
    model.fit(x, y, batch_size=16, epochs=2, callbacks=[backup, checkpoint], verbose=0)
    saved = keras.models.load_model("best.keras")
    at_checkpoint = local(saved)
    at_end = local(model)
    for i in range(0, 20, 10):
        model.train_on_batch(x[i : i + 10], y[i : i + 10])
    apart = local(model)
    loss, _ = model.evaluate(x, y, verbose=0)
    evaluated = local(model)
    model.train_on_batch(x[:10], y[:10])
    model.save("other.keras")
    return {
        "checkpoint": at_checkpoint,
        "at_end": at_end,
        "apart": apart,
        "loss": np.array(loss),
        "evaluated": evaluated,
        "saved": local(keras.models.load_model("other.keras")),
        "after_saving": local(model),
    }


def case_validated():
    x, y = data()
    seen = []

    class Look(keras.callbacks.Callback):
        def on_test_begin(self, logs=None):
            seen.append(local(self.model))

    model = compiled(classifier(), sgd())
    model.fit(x, y, batch_size=20, epochs=2, validation_split=0.2, callbacks=[Look()])
    return {"seen": np.array(seen)}


def tape_loop(compile_step):
    x, y = data(96)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)
    model, other = classifier(), classifier()
    optimizers = sgd(), keras.optimizers.Adam(0.01)

    def step(x, y):
        for net, optimizer in zip((model, other), optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(
                    keras.losses.sparse_categorical_crossentropy(y, net(x))
                )
            weights = net.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)

    if compile_step:
        step = tf.function(step)
    found = []
    for _ in range(2):
        for batch in dataset:
            step(*batch)
            found.append(local(model))
        found.append(local(model))
    return {"steps": np.array(found), "other": local(other)}


def case_tape_eager():
    return tape_loop(compile_step=False)


def case_tape_graph():
    return tape_loop(compile_step=True)


def case_functions():
    """Functions of a loop: a metric, a tape around a function, arrays, a sum."""
    x, y = data(60)
    cross_entropy = keras.losses.SparseCategoricalCrossentropy()
    nets = [classifier() for _ in range(4)]
    optimizers = [sgd(), sgd(), sgd(0.001), sgd()]
    seen = keras.metrics.Mean()

    def apply(index, tape, loss):
        weights = nets[index].trainable_variables
        optimizers[index].apply(tape.gradient(loss, weights), weights)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, nets[0](x))
        apply(0, tape, loss)
        seen.update_state(loss)

    @tf.function
    def forward(x, y):
        return cross_entropy(y, nets[1](x))

    @tf.function
    def all_rows():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(nets[2](x)[:, 0] ** 2)
            loss += 0.01 * tf.reduce_sum(nets[2].trainable_variables[0] ** 2)
        apply(2, tape, loss)

    @tf.function
    def without_optimizer(x, y):
        with tf.GradientTape() as tape:
            loss = cross_entropy(y, nets[3](x))
        weights = nets[3].trainable_variables
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)

    for batch in tf.data.Dataset.from_tensor_slices((x, y)).batch(16):
        step(*batch)
        with tf.GradientTape() as tape:
            loss = forward(*batch)
        apply(1, tape, loss)
        all_rows()
        without_optimizer(*batch)
    weights = {f"w{i}": local(net) for i, net in enumerate(nets)}
    return {**weights, "seen": seen.result().numpy()}


def case_embedding():
    """Sparse gradients, and a last batch with fewer rows than ranks."""
    ids = np.arange(49) % 7
    model = keras.Sequential(
        [
            keras.Input((1,), dtype="int32"),
            keras.layers.Embedding(9, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    compiled(model, sgd(0.5))
    history = model.fit(ids[:, None], ids % 2, batch_size=16, epochs=4, shuffle=False)
    return results(model, history)


class Largest(keras.metrics.Metric):
    """The largest output, and the number of rows."""

    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")
        self.rows = self.add_variable((), "zeros", dtype="int32", name="rows")

    def update_state(self, y, predicted, sample_weight=None):
        self.value.assign(tf.maximum(self.value, tf.reduce_max(predicted)))
        self.rows.assign(self.rows + tf.shape(predicted)[0])

    def result(self):
        return {"largest": self.value.value, "rows": self.rows.value}


def case_states():
    """A state for each row, and a metric that is no sum."""
    x, y = data(40)
    model = keras.Sequential(
        [
            keras.Input(batch_shape=(10, 2, 3)),
            keras.layers.LSTM(4, stateful=True),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    compiled(model, sgd(), metrics=[Largest()])
    x = x.reshape(40, 2, 3)
    history = model.fit(x, y, batch_size=10, epochs=2, shuffle=False, verbose=0)
    return results(model, history)


def case_batch_normalization():
    x, y = data()
    model = compiled(classifier(keras.layers.BatchNormalization()), sgd())
    model.fit(x, y, batch_size=16, epochs=3, verbose=0)
    return results(model)


def case_mixed_precision():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        x, y = data()
        model = compiled(classifier(dtype="mixed_float16"), sgd())
        history = model.fit(x, y, batch_size=16, epochs=4, verbose=0)
        return {**results(model, history), "scaled": np.array(model.optimizer.name)}
    finally:
        keras.mixed_precision.set_global_policy("float32")


def case_drift():
    """A learning rate at which replicas drift apart."""
    x, y = data()
    model = compiled(classifier(), keras.optimizers.Adam(1e-4))
    for rate in [1e-4] * 8 + [1.0] * 6:
        model.optimizer.learning_rate = rate
        model.fit(x, y, batch_size=16, verbose=0)
    return {"done": np.array(1)}


if __name__ == "__main__":
    if "many_weights" in sys.argv:
        hooked: Any = process_group.group()._transport
        hooked._host_key = ""
    main(globals())
