# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Logs that custom ``train_step`` and ``test_step`` methods return."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.runtime.programs.cases.tools import classifier, data, main, results

EPOCHS = 3


def batches(rows=50):
    """Rows that give a smaller last batch both in training and in validation."""
    x, y = data(rows)
    return x, y.astype("float32")[:, None]


class Stepping(keras.Model):
    """A model with custom steps; subclasses define the logs."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="tanh")
        self.out = keras.layers.Dense(1, activation="sigmoid")

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.logs(loss, y, y_pred)

    def test_step(self, data):
        x, y = data[:2]
        y_pred = self(x, training=False)
        return self.logs(self.compute_loss(y=y, y_pred=y_pred), y, y_pred)


class AsInTheGuide(Stepping):
    """Updates the compiled metrics one by one; the logs are nested."""

    def logs(self, loss, y, y_pred):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


class OnlySome(Stepping):
    """Logs one metric under another name, and a loss that no metric tracks."""

    def logs(self, loss, y, y_pred):
        self.compute_metrics(None, y, y_pred)
        accuracy = self.metrics[1].metrics[0]
        return {"plain": loss, "share_right": accuracy.result()}


class Derived(Stepping):
    """Logs a number computed from a result, and values that no metric has."""

    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean("entropy")

    @property
    def metrics(self):
        return [self.tracker]

    def logs(self, loss, y, y_pred):
        self.tracker.update_state(loss)
        return {
            "entropy": self.tracker.result(),
            "perplexity": tf.exp(self.tracker.result()),
            "rate": self.optimizer.learning_rate,
            "rows": tf.shape(y)[0],
        }


class InAFunction(AsInTheGuide):
    """The steps are ``tf.function``s: their results come from another graph."""

    @tf.function
    def train_step(self, data):
        return super().train_step(data)

    @tf.function
    def test_step(self, data):
        return super().test_step(data)


class ResetsItself(Stepping):
    """Resets its metric in each step, so that it covers the last batch only."""

    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.BinaryAccuracy(name="last")

    def logs(self, loss, y, y_pred):
        self.tracker.reset_state()
        self.tracker.update_state(y, y_pred)
        return {"last": self.tracker.result(), "loss": loss}


def trained(model, metrics=(), callbacks=(), optimizer=None, **kwargs):
    """Weights, history, and what evaluate and the ``*_on_batch`` methods return."""
    x, y = batches()
    model.compile(
        optimizer or keras.optimizers.SGD(0.5),
        "binary_crossentropy",
        metrics=list(metrics) or None,
        **kwargs,
    )
    history = model.fit(
        x[:37], y[:37], batch_size=8, epochs=EPOCHS, verbose=0,
        validation_data=(x[37:], y[37:]), callbacks=list(callbacks),
    )  # fmt: skip
    found = results(model)
    for key, values in history.history.items():
        if isinstance(values[0], dict):
            for inner in values[0]:
                found[f"history_{key}_{inner}"] = np.array([v[inner] for v in values])
        else:
            found[f"history_{key}"] = np.array(values, "float64")
    logs = model.evaluate(x, y, batch_size=7, verbose=0, return_dict=True)
    found |= {f"evaluate_{key}": np.array(value) for key, value in logs.items()}
    found["evaluate"] = np.array(model.evaluate(x, y, batch_size=7, verbose=0))
    logs = model.train_on_batch(x[:9], y[:9], return_dict=True)
    found |= {f"on_batch_history_{key}": np.array(v) for key, v in logs.items()}
    found["test_on_batch_history"] = np.array(model.test_on_batch(x[:11], y[:11]))
    return found


def case_as_in_the_guide():
    model, rates = AsInTheGuide(), []
    keep = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: rates.append(
            float(model.optimizer.learning_rate)
        )
    )
    reduce = keras.callbacks.ReduceLROnPlateau(
        "accuracy", factor=0.5, patience=1, mode="max", min_delta=0.05
    )
    found = trained(model, ["accuracy", keras.metrics.AUC(name="auc")], [reduce, keep])
    return {**found, "rates": np.array(rates)}


def case_as_in_the_guide_eagerly():
    return trained(AsInTheGuide(), ["accuracy"], run_eagerly=True)


def case_as_in_the_guide_several_steps():
    return trained(AsInTheGuide(), ["accuracy"], steps_per_execution=2)


def case_as_in_the_guide_in_a_function():
    return trained(InAFunction(), ["accuracy"])


def case_only_some():
    stop = keras.callbacks.EarlyStopping(
        "val_plain", mode="min", patience=0, min_delta=0.03
    )
    return trained(OnlySome(), ["accuracy"], [stop])


def case_derived():
    return trained(Derived())


def case_derived_eagerly():
    return trained(Derived(), run_eagerly=True)


def case_resets_itself():
    return trained(ResetsItself())


def case_looked_at_batch_by_batch():
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append([logs[key] for key in sorted(logs)])

        def on_test_batch_end(self, batch, logs=None):
            seen.append([logs[key] for key in sorted(logs)])

    found = trained(AsInTheGuide(), ["accuracy"], [Look()])
    return {**found, "history_seen": np.array(seen)}


class Adversaries(keras.Model):
    """A generator and a discriminator, each with its own optimizer and loss tracker."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(6)])
        self.discriminator = classifier()
        self.d_tracker = keras.metrics.Mean(name="d")
        self.g_tracker = keras.metrics.Mean(name="g")
        self.right = keras.metrics.SparseCategoricalAccuracy()

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.entropy = keras.losses.SparseCategoricalCrossentropy()

    def train_step(self, x):
        noise = x[:, :3]
        rows = tf.shape(x)[0]
        labels = tf.concat([tf.ones((rows,)), tf.zeros((rows,))], 0)
        with tf.GradientTape() as tape:
            both = tf.concat([self.generator(noise), x], 0)
            guessed = self.discriminator(both)
            d_loss = self.entropy(labels, guessed)
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            g_loss = self.entropy(
                tf.zeros((rows,)), self.discriminator(self.generator(noise))
            )
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        self.right.update_state(labels, guessed)
        return {
            "d_loss": self.d_tracker.result(),
            "g_loss": self.g_tracker.result(),
            "g_last": g_loss,
            "right": self.right.result(),
        }


def case_adversaries():
    x, _ = data(50)
    model = Adversaries()
    model.compile(keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1))
    dataset = tf.data.Dataset.from_tensor_slices(x).batch(16)
    return results(model, model.fit(dataset, epochs=3, verbose=0))


class OwnResult(Stepping):
    """Adds results in ``compute_metrics``, from a metric that is an attribute."""

    def __init__(self):
        super().__init__()
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    def train_step(self, data):
        return keras.Model.train_step(self, data)

    def test_step(self, data):
        return keras.Model.test_step(self, data)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        found = super().compute_metrics(x, y, y_pred, sample_weight)
        self.error.update_state(y, y_pred)
        found["error"] = self.error.result()
        found["twice"] = 2.0 * self.error.result()
        return found


def case_custom_results():
    return trained(OwnResult(), ["accuracy"])


if __name__ == "__main__":
    main(globals())
