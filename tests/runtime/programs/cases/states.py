# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""State that custom layers and metrics keep from one batch to the next."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.runtime.programs.cases.tools import data, main, results


class Keeps(keras.layers.Layer):
    """Passes its inputs on, and keeps various statistics of them."""

    def build(self, shape):
        def kept(name, **kwargs):
            kwargs = {"shape": (), "initializer": "zeros", "trainable": False} | kwargs
            return self.add_weight(name=name, **kwargs)

        self.seen = kept("seen", dtype="int64")
        self.steps = kept("steps", dtype="int32")
        self.total = kept("total", shape=(shape[-1],))
        self.largest = kept("largest", shape=(shape[-1],))
        self.smallest = kept("smallest", initializer="ones")
        self.average = kept("average", shape=(shape[-1],))
        self.clusters = kept("clusters")

    def call(self, x, training=False):
        if training:
            self.seen.assign_add(tf.cast(tf.shape(x)[0], "int64"))
            self.steps.assign_add(1)
            self.total.assign(self.total + tf.reduce_sum(x, 0))
            self.largest.assign(tf.maximum(self.largest, tf.reduce_max(x, 0)))
            self.smallest.assign(tf.minimum(self.smallest, tf.reduce_min(x)))
            self.average.assign(0.9 * self.average + 0.1 * tf.reduce_mean(x, 0))
            count = tf.reduce_sum(tf.cast(x[:, 0] > 0, x.dtype))
            self.clusters.assign(self.clusters * 0.8 + 0.2 * count)
        return x


def trained(layer, **kwargs):
    x, y = data()
    model = keras.Sequential(
        [keras.Input((6,)), layer, keras.layers.Dense(1, activation="sigmoid")]
    )
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", **kwargs)
    y = y.astype("float32")[:, None]
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    state = {v.name: v.numpy() for v in layer.non_trainable_variables}
    return {**results(model, history), **state}


def case_kept_by_a_layer():
    return trained(Keeps())


def case_kept_by_a_layer_eagerly():
    return trained(Keeps(), run_eagerly=True)


def case_kept_in_a_loop():
    """The layer counts rows; the script resets the count after each epoch."""
    x, y = data(48)
    layer = Keeps()
    model = keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    dataset = tf.data.Dataset.from_tensor_slices((x, y.astype("float32"))).batch(10)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True)[:, 0] - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )

    found = results(model)
    for epoch in range(2):
        for batch in dataset:
            step(*batch)
        found |= {f"{v.name}_{epoch}": v.numpy() for v in layer.non_trainable_variables}
        layer.seen.assign(0)
    return found | results(model)


def stateful(**kwargs):
    model = keras.Sequential(
        [
            keras.Input(batch_shape=(8, 5, 3)),
            keras.layers.LSTM(6, stateful=True, return_sequences=True, dropout=0.1),
            keras.layers.Bidirectional(keras.layers.GRU(4, stateful=True)),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **kwargs)
    return model


def trained_in_windows(model):
    """Each sequence continues in the next batch, and begins anew in the next epoch."""
    generator = np.random.default_rng(2)
    x = generator.normal(size=(48, 5, 3)).astype("float32")
    y = x.sum((1, 2))[:, None]

    class Resets(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            for layer in self.model.layers:
                if hasattr(layer, "reset_state"):
                    layer.reset_state()

    history = model.fit(
        *(x, y),
        batch_size=8,
        epochs=3,
        shuffle=False,
        verbose=0,
        validation_data=(x[:16], y[:16]),
        callbacks=[Resets()],
    )
    kept = {v.path: v.numpy() for v in model.non_trainable_variables}
    evaluated = np.array(model.evaluate(x[:24], y[:24], batch_size=8, verbose=0))
    predicted = model.predict(x[:16], batch_size=8, verbose=0)
    found = {f"kept{i}": kept[path] for i, path in enumerate(sorted(kept))}
    return {
        **results(model, history),
        **{name: value for name, value in found.items() if value.ndim == 2},
        "history_evaluated": evaluated,
        "predicted": predicted,
    }


def case_kept_by_recurrent_layers():
    return trained_in_windows(stateful())


def case_kept_by_recurrent_layers_eagerly():
    return trained_in_windows(stateful(run_eagerly=True))


class Declared(keras.layers.Layer):
    """Declares how its state is aggregated, which could not be inferred."""

    def build(self, shape):
        self.spread = self.add_weight(
            name="spread", initializer="zeros", trainable=False, aggregation="mean"
        )
        self.rows = self.add_weight(
            name="rows", initializer="zeros", trainable=False, aggregation="sum"
        )

    def call(self, x):
        self.spread.assign(tf.math.reduce_std(tf.cast(tf.shape(x)[1], x.dtype) + 0 * x))
        self.rows.assign_add(tf.cast(tf.shape(x)[0], x.dtype))
        return x


def case_declared_by_a_layer():
    return trained(Declared())


class KeepsMore(keras.metrics.Metric):
    """Keeps extremes, the mean of the batches' means, and the last batch's mean."""

    def __init__(self, name="more"):
        super().__init__(name=name)
        self.largest = self.add_variable((), "zeros", name="largest")
        self.smallest = keras.Variable(1.0, name="smallest", trainable=False)
        self.means = self.add_variable((), "zeros", name="means")
        self.batches = self.add_variable((), "zeros", name="batches", dtype="int32")
        self.last = self.add_variable((), "zeros", name="last")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = tf.abs(tf.cast(y_true, y_pred.dtype) - y_pred)
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(error)))
        self.smallest.assign(tf.minimum(self.smallest, tf.reduce_min(error)))
        self.means.assign_add(tf.reduce_mean(error))
        self.batches.assign_add(1)
        self.last.assign(tf.reduce_mean(error))

    def reset_state(self):
        super().reset_state()
        self.smallest.assign(1.0)

    def result(self):
        return {
            "largest": self.largest.value,
            "smallest": self.smallest.value,
            "mean": self.means / tf.cast(tf.maximum(self.batches, 1), "float32"),
            "last": self.last.value,
        }


def case_kept_by_a_metric():
    return trained(keras.layers.Dense(4), metrics=[KeepsMore()])


def case_kept_by_a_metric_in_a_loop():
    metric = KeepsMore()
    x, y = data(48)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    labels = y.astype("float32")[:, None]
    found = results(model)
    for epoch in range(2):
        for rows, truth in tf.data.Dataset.from_tensor_slices((x, labels)).batch(10):
            with tf.GradientTape() as tape:
                guessed = model(rows, training=True)
                loss = tf.reduce_mean((guessed - truth) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            metric.update_state(truth, guessed)
        result = metric.result()
        found |= {f"kept_{epoch}_{k}": np.array(v) for k, v in result.items()}
        metric.reset_state()
    return found | results(model)


if __name__ == "__main__":
    main(globals())
