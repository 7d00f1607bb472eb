# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Losses, weights and masks."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tfcluster.runtime as tfc
from tests.runtime.programs.cases.tools import (
    EPOCHS,
    ROWS,
    classifier,
    compiled,
    data,
    main,
    results,
)


def case_sample_weights():
    x, y = data(ROWS)
    weights = np.random.default_rng(4).uniform(0.1, 3.0, ROWS)
    metrics = ["accuracy", keras.metrics.SparseCategoricalCrossentropy()]
    model = compiled(
        classifier(), keras.optimizers.Adam(0.003), weighted_metrics=metrics
    )
    history = model.fit(
        x[:-40], y[:-40], batch_size=16, epochs=EPOCHS, sample_weight=weights[:-40],
        validation_data=(x[-40:], y[-40:], weights[-40:]), verbose=0,
    )  # fmt: skip
    found = results(model, history)
    found["evaluate"] = np.array(
        model.evaluate(x, y, batch_size=7, sample_weight=weights, verbose=0)
    )
    return found


def case_class_weights_and_validation():
    x, y = data(ROWS)
    model = compiled(classifier(), keras.optimizers.Adam(0.003))
    history = model.fit(
        x, y, batch_size=16, epochs=EPOCHS, class_weight={0: 0.3, 1: 2.0},
        validation_split=0.2, validation_batch_size=4, verbose=0,
    )  # fmt: skip
    return results(model, history)


def case_mean_by_weights():
    """A mean divided by the sum of the weights, which are not the same in all rows."""
    x, y = data(ROWS)
    weights = np.random.default_rng(4).uniform(0.1, 3.0, ROWS)
    weights[3:9] = 0.0
    loss = keras.losses.SparseCategoricalCrossentropy(
        reduction="mean_with_sample_weight"
    )
    model = compiled(classifier(), keras.optimizers.Adam(0.003), loss=loss)
    history = model.fit(
        x, y, batch_size=16, epochs=EPOCHS, sample_weight=weights, shuffle=False,
        verbose=0,
    )  # fmt: skip
    found = results(model, history)
    found["evaluate"] = np.array(
        model.evaluate(x, y, batch_size=7, sample_weight=weights, verbose=0)
    )
    return found


def case_sum():
    x, y = data(ROWS)
    loss = keras.losses.SparseCategoricalCrossentropy(reduction="sum")
    model = compiled(classifier(), keras.optimizers.SGD(0.003), loss=loss)
    history = model.fit(
        x, y, batch_size=16, epochs=EPOCHS, validation_split=0.2, verbose=0
    )
    found = results(model, history)
    logs = model.train_on_batch(x[:11], y[:11])
    found["logs"] = np.array(logs)
    return found


def case_masked_sum():
    """Sequences with a mask and weights, for each reduction."""
    generator = np.random.default_rng(5)
    x = generator.normal(size=(40, 5, 3)).astype("float32")
    x[generator.uniform(size=(40, 5)) < 0.4] = 0.0
    y = x.sum(2, keepdims=True)
    weights = generator.uniform(0.5, 2.0, (40, 5))
    found = {}
    for reduction in ("sum", "mean", "mean_with_sample_weight"):
        keras.utils.set_random_seed(2)
        model = keras.Sequential(
            [keras.Input((5, 3)), keras.layers.Masking(), keras.layers.Dense(1)]
        )
        model.compile(
            keras.optimizers.SGD(0.003 if reduction == "sum" else 0.03),
            keras.losses.MeanSquaredError(reduction=reduction),
            metrics=["mae"],
            weighted_metrics=["mse"],
        )
        history = model.fit(
            x, y, batch_size=7, epochs=5, sample_weight=weights, verbose=0
        )
        for key, value in results(model, history).items():
            found[f"{reduction}_{key}"] = value
    return found


class Variational(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * keras.ops.mean(x**2))
        return x


def case_regularized():
    """Penalties on weights count once, penalties on activities for each row."""
    x, y = data(ROWS)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(
                8,
                activation="tanh",
                kernel_regularizer="l2",
                bias_regularizer="l1",
                activity_regularizer="l2",
            ),
            Variational(),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    compiled(model, keras.optimizers.Adam(0.003))
    history = model.fit(
        x, y, batch_size=16, epochs=EPOCHS, validation_split=0.2, verbose=0
    )
    return results(model, history)


def case_function_of_a_batch():
    """A loss and a metric that return the mean over the batch themselves."""

    def loss(y_true, y_pred):
        return keras.ops.mean(keras.ops.square(y_true - y_pred))

    def largest(y_true, y_pred):
        return keras.ops.mean(keras.ops.abs(y_true - y_pred))

    x, _ = data(ROWS)
    y = x.sum(1, keepdims=True)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.03), loss, metrics=[largest])
    history = model.fit(
        x, y, batch_size=16, epochs=EPOCHS, validation_split=0.2, verbose=0
    )
    return results(model, history)


def case_of_size_one():
    """Its value is 1 for any rows; its gradient depends on the whole batch."""

    def loss(y_true, y_pred):
        squares = keras.ops.mean(keras.ops.square(y_true - y_pred))
        return squares / keras.ops.stop_gradient(squares)

    x, _ = data(ROWS)
    y = x.sum(1, keepdims=True)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.03), loss, metrics=["mae"])
    return results(model, model.fit(x, y, batch_size=16, epochs=2, verbose=0))


def similarity(y_true, y_pred):
    """Each row has to be most similar to itself, among all rows of the batch."""
    rows = tf.math.l2_normalize(y_pred, 1)
    logits = 5 * tf.matmul(rows, rows * (1 + y_true), transpose_b=True)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.range(tf.shape(rows)[0]), logits
    )


def correlation(y_true, y_pred):
    """In float64: the differences of nearly equal numbers lose digits."""
    y_true, y_pred = tf.cast(y_true, "float64"), tf.cast(y_pred, "float64")
    y_true, y_pred = y_true - tf.reduce_mean(y_true), y_pred - tf.reduce_mean(y_pred)
    squares = tf.reduce_sum(y_true**2) * tf.reduce_sum(y_pred**2)
    found = 2 - tf.reduce_sum(y_true * y_pred) / tf.sqrt(squares + 1e-2)
    return tf.cast(found, "float32")


def median(y_true, y_pred):
    errors = tf.reshape(tf.abs(y_true - y_pred), [-1])
    return tf.sort(errors)[tf.size(errors) // 2]


class Spread(keras.metrics.Metric):
    """The decaying average of the batches' standard deviations: no function of sums."""

    def __init__(self, name="spread"):
        super().__init__(name=name)
        self.average = self.add_variable((), "zeros", name="average")
        self.batches = self.add_variable((), "zeros", name="batches")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.average.assign(0.9 * self.average + tf.math.reduce_std(y_pred - y_true))
        self.batches.assign_add(1.0)

    def result(self):
        return self.average / self.batches


@tfc.merge_with(sum, largest=max)
class Declared(keras.metrics.Metric):
    def __init__(self, name="declared"):
        super().__init__(name=name)
        self.total = self.add_variable((), "zeros", name="total")
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        errors = tf.abs(y_true - y_pred)
        self.total.assign_add(tf.reduce_sum(errors))
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(errors)))

    def result(self):
        return self.total + self.largest


def of_the_whole_batch(loss, **kwargs):
    """46 rows in batches of 8: the ranks' parts differ, and one may be empty."""
    x, labels = data(46)
    y = np.eye(3, dtype="float32")[labels % 3]
    keras.utils.set_random_seed(2)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(3, activation="sigmoid")]
    )
    metrics = [correlation, median, Spread(), Declared()]
    model.compile(keras.optimizers.SGD(0.05), loss, metrics=metrics, **kwargs)
    weights = np.linspace(0.5, 1.5, 46)
    history = model.fit(
        x,
        y,
        sample_weight=weights if loss is correlation else None,
        batch_size=8,
        epochs=2,
        validation_data=(x[:9], y[:9]),
        verbose=0,
    )
    return results(model, history)


def case_dice():
    return of_the_whole_batch(keras.losses.Dice())


def case_similarity():
    return of_the_whole_batch(similarity)


def case_correlation_eagerly():
    return of_the_whole_batch(correlation, run_eagerly=True)


class Contrastive(keras.losses.Loss):
    """Overrides ``__call__``, as an example of Keras's site does."""

    def __call__(self, labels, features, sample_weight=None):
        features = tf.math.l2_normalize(features, axis=1)
        same = tf.cast(tf.equal(labels, tf.transpose(labels)), features.dtype)
        targets = same / tf.reduce_sum(same, 1, keepdims=True)
        logits = features @ tf.transpose(features)
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(targets, logits))


class Half(keras.losses.MeanSquaredError):
    """Calls Keras's ``__call__`` in its own, and is a mean over rows."""

    def __call__(self, y_true, y_pred, sample_weight=None):
        return super().__call__(y_true, y_pred, sample_weight) / 2


def case_classes_with_their_own_call():
    x, y = data(46)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    outputs = [keras.layers.Dense(size)(hidden) for size in (3, 1)]
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.05), [Contrastive(), Half()])
    labels = [y[:, None], x[:, :1]]
    history = model.fit(
        x,
        labels,
        batch_size=8,
        epochs=2,
        validation_data=(x[:9], [each[:9] for each in labels]),
        verbose=0,
    )
    return results(model, history)


class OwnLoss(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(2, activation="softmax")
        self.largest = keras.metrics.Mean("largest")

    def call(self, x):
        return self.out(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + 0.1 * keras.ops.mean(keras.ops.square(y_pred))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.largest.update_state(keras.ops.max(y_pred, axis=1))
        return super().compute_metrics(x, y, y_pred, sample_weight)


def case_computed_by_the_model():
    x, y = data(ROWS)
    model = compiled(OwnLoss(), keras.optimizers.Adam(0.01))
    history = model.fit(
        x, y, batch_size=16, epochs=EPOCHS, validation_split=0.2, verbose=0
    )
    return results(model, history)


if __name__ == "__main__":
    main(globals())
