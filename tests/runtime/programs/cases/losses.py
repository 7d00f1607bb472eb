# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Losses, weights and masks."""

from __future__ import annotations

import keras
import numpy as np

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
    """A mean divided by the sum of the weights, which differs between ranks."""
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
