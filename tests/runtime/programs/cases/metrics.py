# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Metrics of Keras, custom metrics and metric functions."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.runtime.programs.cases.tools import (
    EPOCHS,
    ROWS,
    classifier,
    compiled,
    data,
    main,
    results,
)


class RowsByLabel(keras.metrics.Metric):
    """A custom metric that counts the rows of each label."""

    def __init__(self, name="rows"):
        super().__init__(name=name)
        self.seen = self.add_variable((2,), "zeros", name="seen", dtype="int32")

    def update_state(self, y_true, y_pred, sample_weight=None):
        labels = tf.reshape(tf.cast(y_true, "int32"), [-1])
        self.seen.assign_add(tf.math.bincount(labels, minlength=2, maxlength=2))

    def result(self):
        return tf.reduce_sum(self.seen)


def case_metrics():
    x, y = data()
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(1, activation="sigmoid")]
    )
    model.compile(
        "adam",
        "binary_crossentropy",
        metrics=[
            keras.metrics.AUC(name="auc"),
            keras.metrics.Precision(name="precision"),
            keras.metrics.RootMeanSquaredError(name="rmse"),
            keras.metrics.F1Score(threshold=0.5, average="micro", name="f1"),
            RowsByLabel(),
        ],
    )
    y = y.astype("float32")[:, None]
    return results(model, model.fit(x, y, batch_size=16, epochs=2, verbose=0))


def case_more_metrics():
    """Metrics that count, that keep matrices, and that are weighted."""
    x, y = data()
    model = classifier()
    model.compile(
        keras.optimizers.SGD(0.1),
        "categorical_crossentropy",
        metrics=[
            keras.metrics.AUC(curve="PR", multi_label=True, name="pr"),
            keras.metrics.Recall(class_id=1, name="recall"),
            keras.metrics.SensitivityAtSpecificity(0.5, name="sensitivity"),
            keras.metrics.F1Score(average="macro", name="f1"),
            keras.metrics.OneHotMeanIoU(num_classes=2, name="iou"),
            keras.metrics.CategoricalAccuracy(name="top"),
            keras.metrics.CosineSimilarity(name="cosine"),
            keras.metrics.R2Score(class_aggregation=None, name="r2"),
            keras.metrics.MeanSquaredLogarithmicError(name="log"),
        ],
        weighted_metrics=[keras.metrics.CategoricalAccuracy(name="weighted")],
    )
    y = np.eye(2, dtype="float32")[y]
    weights = np.linspace(0.2, 2.0, 40)
    history = model.fit(
        x[:40], y[:40], batch_size=9, epochs=4, sample_weight=weights,
        validation_data=(x[40:], y[40:]), verbose=0,
    )  # fmt: skip
    found = results(model, history)
    for key, value in model.evaluate(
        x, y, batch_size=7, return_dict=True, verbose=0
    ).items():
        found[f"evaluate_{key}"] = np.array(value)
    return found


class LossInMean(keras.Model):
    """Updates ``Mean`` once per batch with the mean loss, as in the Keras guides."""

    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(1)
        self.tracker = keras.metrics.Mean("loss")
        self.error = keras.metrics.MeanAbsoluteError("mae")

    def call(self, x):
        return self.out(x)

    @property
    def metrics(self):
        return [self.tracker, self.error]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = tf.reduce_mean(tf.square(y - y_pred))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        self.tracker.update_state(loss)
        self.error.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        self.tracker.update_state(tf.reduce_mean(tf.square(y - y_pred)))
        self.error.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


def case_mean_of_means():
    x, _ = data(ROWS)
    y = x.sum(1, keepdims=True)
    model = LossInMean()
    model.compile(keras.optimizers.Adam(0.01))
    history = model.fit(
        x, y, batch_size=16, epochs=EPOCHS, validation_split=0.2, verbose=0
    )
    found = results(model, history)
    found["evaluate"] = np.array(model.evaluate(x, y, batch_size=7, verbose=0))
    return found


def wrong_in_sum(y_true, y_pred):
    """A sum over the batch, which is unusual for a metric."""
    return tf.reduce_sum(tf.abs(tf.cast(y_true, y_pred.dtype) - y_pred))


def wrong_in_mean(y_true, y_pred):
    return tf.reduce_mean(tf.abs(tf.cast(y_true, y_pred.dtype) - y_pred))


def wrong_by_row(y_true, y_pred):
    return tf.reduce_mean(tf.abs(tf.cast(y_true, y_pred.dtype) - y_pred), -1)


class MeanOfBatches(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(wrong_in_mean(y_true, y_pred))


def case_functions_of_a_batch():
    """A metric function may return a sum, a mean, or one number per row."""
    x, y = data(90)
    functions = [wrong_in_sum, wrong_in_mean, wrong_by_row, MeanOfBatches("own")]
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=functions)
    history = model.fit(
        x, y[:, None], batch_size=11, epochs=3, validation_split=0.2, verbose=0
    )
    found = results(model, history)
    found["evaluate"] = np.array(model.evaluate(x, y[:, None], verbose=0, batch_size=7))
    return found


def case_functions_of_a_batch_eagerly():
    x, y = data(90)
    functions = [wrong_in_sum, wrong_in_mean, wrong_by_row, MeanOfBatches("own")]
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(
        keras.optimizers.SGD(0.01), "mse", metrics=functions, run_eagerly=True
    )
    history = model.fit(x, y[:, None], batch_size=11, epochs=2, verbose=0)
    return results(model, history)


class Totals(keras.Model):
    """Updates ``Mean`` and ``Sum`` with one mean, sum or count per batch."""

    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(1)
        self.sum_of_means = keras.metrics.Sum("sum_of_means")
        self.rows = keras.metrics.Sum("rows")
        self.batches = keras.metrics.Sum("batches")
        self.mean_of_sums = keras.metrics.Mean("mean_of_sums")
        self.mean_of_means = keras.metrics.Mean("mean_of_means")

    def call(self, x):
        return self.out(x)

    @property
    def metrics(self):
        sums = [self.sum_of_means, self.rows, self.batches]
        return [*sums, self.mean_of_sums, self.mean_of_means]

    def count(self, x, error):
        self.sum_of_means.update_state(tf.reduce_mean(error))
        self.rows.update_state(tf.shape(x)[0])
        self.batches.update_state(tf.constant(1.0))
        self.mean_of_sums.update_state(tf.reduce_sum(error))
        self.mean_of_means.update_state(tf.reduce_mean(error))
        return {m.name: m.result() for m in self.metrics}

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            error = tf.square(y - self(x, training=True))
            loss = tf.reduce_mean(error)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return self.count(x, error)

    def test_step(self, data):
        x, y = data
        return self.count(x, tf.square(y - self(x)))


def totals(**kwargs):
    x, _ = data(90)
    y = x.sum(1, keepdims=True)
    model = Totals()
    model.compile(keras.optimizers.SGD(0.01), **kwargs)
    history = model.fit(x, y, batch_size=11, epochs=3, validation_split=0.2, verbose=0)
    return results(model, history)


def case_numbers_of_batches():
    return totals()


def case_numbers_of_batches_eagerly():
    return totals(run_eagerly=True)


def case_numbers_of_batches_in_a_loop():
    x, _ = data(90)
    batches = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(11)
    found = {}
    for name, decorated in (("eager", lambda f: f), ("graph", tf.function)):
        model = Totals()
        model.compile(keras.optimizers.SGD(0.01))
        model.build((None, 6))
        step = decorated(lambda x, y, model=model: model.train_step((x, y)))
        for x, y in batches:
            step(x, y)
        for metric in model.metrics:
            found[f"history_{name}_{metric.name}"] = np.array(metric.result())
    return found


class Median(keras.metrics.Metric):
    """The median of all errors of an epoch, kept in a list."""

    def __init__(self, name="median"):
        super().__init__(name=name)
        self.errors = []

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.errors.append(np.abs(np.array(y_true) - np.array(y_pred)))

    def result(self):
        return float(np.median(np.concatenate(self.errors))) if self.errors else 0.0

    def reset_state(self):
        super().reset_state()
        self.errors = []


class MedianByUpdates(Median):
    """The same, with a variable that counts updates beside the list."""

    def __init__(self, name="counted"):
        super().__init__(name=name)
        self.updates = self.add_variable((), "zeros", name="updates")

    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(y_true, y_pred)
        self.updates.assign_add(1)

    def result(self):
        return super().result() + 100.0 * len(self.errors) + float(self.updates)


class SumOfErrors(keras.metrics.Metric):
    """Makes its variable in its first update."""

    def __init__(self, name="late"):
        super().__init__(name=name)
        self.total = None

    def update_state(self, y_true, y_pred, sample_weight=None):
        if self.total is None:
            self.total = self.add_variable((), "zeros", name="total")
        self.total.assign_add(tf.reduce_sum(tf.abs(y_true - y_pred)))

    def result(self):
        return 0.0 if self.total is None else self.total + 0.0


def case_kept_in_python():
    x, y = data(90)
    y = y.astype("float32")[:, None]
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    own = [Median(), MedianByUpdates(), SumOfErrors()]
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=own, run_eagerly=True)
    history = model.fit(x, y, batch_size=11, epochs=2, validation_split=0.2, verbose=0)
    found = results(model, history)
    found["evaluate"] = np.array(model.evaluate(x, y, verbose=0, batch_size=7))
    return found


def case_read_by_callbacks():
    """A callback that reads results in the middle of an epoch, and evaluates."""
    seen = []

    class Reader(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.extend([logs["loss"], logs["accuracy"]])

        def on_epoch_end(self, epoch, logs=None):
            seen.extend(self.model.evaluate(x, y, batch_size=7, verbose=0))
            seen.append(float(self.model.predict(x, verbose=0)[3, 0]))
            seen.extend([logs["loss"], logs["val_accuracy"]])

    x, y = data()
    model = compiled(classifier())
    model.fit(
        x, y, batch_size=16, epochs=3, validation_split=0.2, verbose=0,
        callbacks=[Reader()],
    )  # fmt: skip
    return {**results(model), "seen": np.array(seen)}


if __name__ == "__main__":
    main(globals())
