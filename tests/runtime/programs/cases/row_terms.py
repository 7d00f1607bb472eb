# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Losses that couple the rows of a batch, in ``fit``, in steps and in loops; and
losses whose rows are independent, for which nothing may be reported."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.runtime.programs.cases.tools import data, main, raised_by

MASKED = "this loss is not a mean over the rows"


def masked_data(rows=42):
    """Rows of six numbers with targets and a mask; its number of ones varies."""
    x, y = data(rows)
    lengths = np.random.default_rng(2).integers(1, 6, rows)
    mask = (np.arange(5) < lengths[:, None]).astype("float32")
    return x, np.tile(y[:, None], 5).astype("float32"), mask


def masked_mean(y, predicted, mask):
    return tf.reduce_sum((predicted - y) ** 2 * mask) / tf.reduce_sum(mask)


def network(*extra):
    first, last = keras.layers.Dense(8, "relu"), keras.layers.Dense(5)
    return keras.Sequential([keras.Input((6,)), first, *extra, last])


def noisy():
    """A network with layers that are random or that depend on other rows."""
    return network(keras.layers.BatchNormalization(), keras.layers.Dropout(0.3))


def batches(drop_remainder=False):
    return tf.data.Dataset.from_tensor_slices(masked_data()).batch(8, drop_remainder)


def fitting(model, **kwargs):
    x, y, mask = masked_data()
    model.compile("sgd", **kwargs)
    return raised_by(lambda: model.fit((x, mask), y, batch_size=8, verbose=0))


class Masking(keras.Model):
    """Computes a masked mean in a custom ``train_step``."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def train_step(self, data):
        (x, mask), y = data
        with tf.GradientTape() as tape:
            loss = masked_mean(y, self.network(x, training=True), mask)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def case_step_with_a_mask():
    return fitting(Masking(network()))


class MaskingEagerly(Masking):
    def train_step(self, data):
        (x, mask), y = data
        with tf.GradientTape() as tape:
            loss = masked_mean(y, self.network(x, training=True), mask)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def case_step_with_a_mask_eagerly():
    return fitting(MaskingEagerly(network()), run_eagerly=True)


class MaskedLoss(keras.Model):
    """Computes a masked mean in ``compute_loss``."""

    def __init__(self):
        super().__init__()
        self.network = network()

    def call(self, inputs):
        return self.network(inputs[0])

    def compute_loss(self, x, y, y_pred, sample_weight, training=True):
        return masked_mean(y, y_pred, x[1])


def case_computed_loss_with_a_mask():
    x, y, mask = masked_data()
    model = MaskedLoss()
    model.compile("sgd")
    return raised_by(lambda: model.fit((x, mask), y, batch_size=8, verbose=0))


def case_loop_with_a_mask():
    model, optimizer = network(), keras.optimizers.SGD(0.01)

    @tf.function
    def step(x, y, mask):
        with tf.GradientTape() as tape:
            loss = masked_mean(y, model(x, training=True), mask)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    for batch in batches():
        step(*batch)
    return {"raised": np.array("nothing")}


def case_loop_with_a_mask_eagerly():
    model, optimizer = network(), keras.optimizers.SGD(0.01)
    for x, y, mask in batches():
        with tf.GradientTape() as tape:
            loss = masked_mean(y, model(x, training=True), mask)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
    return {"raised": np.array("nothing")}


def half_labelled(y, outputs):
    """The labels of the second half do not count."""
    half = tf.shape(y)[0] // 2
    labelled = tf.reduce_mean(tf.square(outputs[:half] - y[:half]))
    return labelled + 0.3 * tf.reduce_mean(tf.square(outputs[half:]))


class Halves(Masking):
    def train_step(self, data):
        (x, _), y = data
        with tf.GradientTape() as tape:
            loss = half_labelled(y, self.network(x, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def case_halves_in_a_step():
    return fitting(Halves(network()))


def case_halves_in_an_eager_loop():
    model, optimizer = network(), keras.optimizers.SGD(0.01)
    for x, y, _ in batches():
        with tf.GradientTape() as tape:
            loss = half_labelled(y, model(x, training=True))
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
    return {"raised": np.array("nothing")}


def two_losses(x, y, outputs):
    return (
        tf.reduce_mean(tf.square(outputs - y)),
        tf.reduce_mean(tf.abs(outputs[:, 0] - x[:, 0])),
    )


def case_loop_with_a_detached_ratio():
    """Its value is a mean over rows, but its gradient has the ratio of the batch."""
    model, optimizer = network(), keras.optimizers.SGD(0.01)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            one, other = two_losses(x, y, model(x, training=True))
            loss = one + tf.stop_gradient(one / other) * other
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    for x, y, _ in batches():
        step(x, y)
    return {"raised": np.array("nothing")}


def case_loop_with_a_detached_ratio_eagerly():
    model, optimizer = network(), keras.optimizers.SGD(0.01)
    for x, y, _ in batches():
        with tf.GradientTape() as tape:
            one, other = two_losses(x, y, model(x, training=True))
            loss = one / tf.stop_gradient(one) + other
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
    return {"raised": np.array("nothing")}


def case_no_loop_with_a_detached_loss():
    """A number that is only added changes no gradient."""
    model, optimizer = network(), keras.optimizers.SGD(0.01)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            one, other = two_losses(x, y, model(x, training=True))
            loss = one + tf.stop_gradient(other)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    for x, y, _ in batches():
        step(x, y)
    return {"raised": np.array("nothing")}


def case_layers_of_operations():
    """Attention over the batch, written with ``keras.ops``."""
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "relu")(inputs)
    alike = keras.ops.softmax(keras.ops.matmul(hidden, keras.ops.transpose(hidden)))
    outputs = keras.layers.Dense(5)(keras.ops.matmul(alike, hidden))
    model = keras.Model(inputs, outputs)
    x, y, _ = masked_data()
    model.compile("sgd", "mse")
    return raised_by(lambda: model.fit(x, y, batch_size=8, verbose=0))


def case_no_halves_but_noise():
    """Random numbers belong to places in the batch, and loops may draw any."""
    model, optimizer = network(), keras.optimizers.SGD(0.01)
    for x, y, _ in batches():
        with tf.GradientTape() as tape:
            noise = keras.random.normal(tf.shape(x), seed=3)
            loss = tf.reduce_mean(tf.square(model(x + noise, training=True) - y))
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
    return {"raised": np.array("nothing")}


def case_loop_with_a_selection():
    """The loss is over the entries that a mask selects: a data-dependent number."""
    model, optimizer = noisy(), keras.optimizers.SGD(0.01)

    @tf.function
    def step(x, y, mask):
        with tf.GradientTape() as tape:
            errors = (model(x, training=True) - y) ** 2
            loss = tf.reduce_mean(tf.boolean_mask(errors, mask > 0))
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    for batch in batches():
        step(*batch)
    return {"raised": np.array("nothing")}


def case_loop_with_a_selection_eagerly():
    model, optimizer = network(), keras.optimizers.SGD(0.01)
    for x, y, mask in batches():
        with tf.GradientTape() as tape:
            errors = (model(x, training=True) - y) ** 2
            loss = tf.reduce_mean(tf.boolean_mask(errors, mask > 0))
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
    return {"raised": np.array("nothing")}


def case_loop_of_similarities():
    """A contrastive loss that compares each row with all others."""
    model, optimizer = network(), keras.optimizers.SGD(0.01)

    @tf.function
    def step(x, y, mask):
        with tf.GradientTape() as tape:
            one, two = model(x), model(x * 0.9)
            logits = tf.matmul(one, two, transpose_b=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.range(tf.shape(x)[0]), logits
            )
            loss = tf.reduce_mean(losses)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    for batch in batches():
        step(*batch)
    return {"raised": np.array("nothing")}


def case_loop_of_a_function():
    """The forward pass is a ``tf.function`` within an eager loop."""
    model, optimizer = network(), keras.optimizers.SGD(0.01)

    @tf.function
    def loss_of(x, y, mask):
        return masked_mean(y, model(x, training=True), mask)

    for batch in batches():
        with tf.GradientTape() as tape:
            loss = loss_of(*batch)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
    return {"raised": np.array("nothing")}


def fitting_with(loss):
    """Use Keras's own step. The first predictions are nearly the same for all rows."""
    x, y, mask = masked_data()
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, "relu"),
            keras.layers.Dense(5, kernel_initializer=keras.initializers.Constant(1e-4)),
        ]
    )
    model.compile("sgd", loss)
    targets = np.where(mask > 0, y, np.nan).astype("float32")
    return raised_by(lambda: model.fit(x, targets, batch_size=8, verbose=0))


def case_no_fit_with_a_mask():
    """Missing targets do not count: the loss gets the rows of all ranks."""

    def present(y_true, y_pred):
        there = ~tf.math.is_nan(y_true)
        errors = tf.where(there, y_pred - tf.where(there, y_true, 0.0), 0.0) ** 2
        return tf.reduce_sum(errors) / tf.reduce_sum(tf.cast(there, tf.float32))

    return fitting_with(present)


def case_no_fit_with_a_statistic():
    """A loss per row, each divided by the largest one of the batch."""

    def scaled(y_true, y_pred):
        there = ~tf.math.is_nan(y_true)
        errors = tf.where(there, y_pred - tf.where(there, y_true, 0.0), 0.0) ** 2
        errors = tf.reduce_mean(errors, -1)
        return errors / tf.stop_gradient(tf.reduce_max(errors))

    return fitting_with(scaled)


class SpreadOfTheBatch(keras.layers.Layer):
    """Appends the standard deviation over all rows to each row, as some critics do."""

    def call(self, x):
        spread = tf.reduce_mean(tf.math.reduce_std(x, 0))
        return tf.concat([x, tf.fill((tf.shape(x)[0], 1), spread)], -1)


def case_layer_that_sees_the_batch():
    """A layer couples the rows, in ``fit`` with a loss of Keras."""
    x, y, _ = masked_data()
    model = keras.Sequential(
        [keras.Input((6,)), SpreadOfTheBatch(), keras.layers.Dense(5)]
    )
    model.compile("sgd", "mse")
    return raised_by(lambda: model.fit(x, y, batch_size=8, verbose=0))


# The losses below are means over rows: no warning.


class Block(keras.layers.Layer):
    """A custom transformer layer."""

    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 3, dropout=0.1)
        self.normalization = keras.layers.LayerNormalization()

    def call(self, x):
        return self.normalization(x + self.attention(x, x))


def case_no_custom_layer():
    x, y, _ = masked_data()
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Reshape((3, 2)),
            Block(),
            keras.layers.Flatten(),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(5),
        ]
    )
    model.compile("sgd", "mse")
    return raised_by(lambda: model.fit(x, y, batch_size=8, verbose=0))


class Averaging(Masking):
    def train_step(self, data):
        (x, mask), y = data
        with tf.GradientTape() as tape:
            errors = (self.network(x, training=True) - y) ** 2 * mask
            loss = tf.reduce_mean(tf.reduce_sum(errors, 1) / tf.reduce_sum(mask, 1))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def case_no_step_with_a_mask_in_each_row():
    return fitting(Averaging(noisy()))


def case_no_step_with_a_mask_in_each_row_eagerly():
    return fitting(Averaging(noisy()), run_eagerly=True)


class Adversary(keras.Model):
    """A GAN with two tapes, noise and a gradient penalty."""

    def __init__(self):
        super().__init__()
        self.generator = network()
        self.critic = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(4, "tanh"),
                keras.layers.Dense(1),
            ]
        )

    def compile(self):
        super().compile()
        self.one, self.two = keras.optimizers.Adam(), keras.optimizers.Adam()

    def train_step(self, data):
        (x, _), y = data
        rows = tf.shape(x)[0]
        noise = tf.random.normal((rows, 6))
        with tf.GradientTape() as tape:
            made = self.generator(noise, training=True)
            share = tf.random.uniform((rows, 1))
            between = share * y + (1.0 - share) * made
            with tf.GradientTape() as inner:
                inner.watch(between)
                judged = self.critic(between)
            slopes = inner.gradient(judged, between)
            penalty = tf.reduce_mean((tf.norm(slopes + 1e-3, axis=1) - 1.0) ** 2)
            loss = tf.reduce_mean(self.critic(made)) - tf.reduce_mean(self.critic(y))
            loss += 10.0 * penalty
        weights = self.critic.trainable_variables
        self.one.apply(tape.gradient(loss, weights), weights)
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(self.critic(self.generator(noise, training=True)))
            loss += 1e-3 * tf.add_n(
                [tf.nn.l2_loss(w) for w in self.generator.trainable_variables]
            )
        weights = self.generator.trainable_variables
        self.two.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def adversary(**kwargs):
    x, y, mask = masked_data()
    model = Adversary()
    model.compile()
    model.run_eagerly = kwargs.get("run_eagerly", False)
    return raised_by(lambda: model.fit((x, mask), y, batch_size=8, verbose=0))


def case_no_fit_of_rows():
    """A loss per row, and the mean over the rows."""

    def errors(y_true, y_pred):
        there = ~tf.math.is_nan(y_true)
        return tf.where(there, y_pred - tf.where(there, y_true, 0.0), 0.0) ** 2

    found = fitting_with(lambda y, p: tf.reduce_mean(errors(y, p), -1))
    fitting_with(lambda y, p: tf.reduce_mean(errors(y, p)))
    return found


def case_no_adversary():
    return adversary()


def case_no_adversary_eagerly():
    return adversary(run_eagerly=True)


def case_no_loop_of_means():
    """Dropout, embeddings, attention and a loss object, in a graph and eagerly."""
    words = np.random.default_rng(5).integers(1, 12, (40, 7))
    of_words = tf.data.Dataset.from_tensor_slices((words, words[:, 0] % 3)).batch(8)
    inputs = keras.Input((7,), dtype="int32")
    hidden = keras.layers.Embedding(12, 4, mask_zero=True)(inputs)
    hidden = keras.layers.MultiHeadAttention(2, 3, dropout=0.2)(hidden, hidden)
    hidden = keras.layers.GRU(4)(hidden)
    model = keras.Model(inputs, keras.layers.Dense(3)(hidden))
    optimizer = keras.optimizers.Adam()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    for function in (tf.function(step), step):
        for batch in of_words:
            function(*batch)
    return {"raised": np.array("nothing")}


class Reporting(keras.Model):
    """Its metrics get numbers of batches that are means of rows, and others.

    Their names contain the case, as the runtime repeats no warning.
    """

    def __init__(self, case):
        super().__init__()
        self.network, self.case = network(), case
        names = "loss", "error", "penalty", "right", "precision", "deviation"
        self.reports = {name: keras.metrics.Mean(f"{name}_{case}") for name in names}

    @property
    def metrics(self):
        return list(self.reports.values())

    def call(self, x, training=False):
        return self.network(x, training=training)

    def report(self, y, predicted):
        hits = tf.cast(predicted > 0, tf.float32)
        right = tf.cast(tf.equal(hits, y), tf.float32)
        precision = tf.math.divide_no_nan(tf.reduce_sum(hits * y), tf.reduce_sum(hits))
        self.reports["right"].update_state(tf.reduce_mean(right))
        self.reports["precision"].update_state(precision)
        self.reports["deviation"].update_state(tf.math.reduce_std(predicted))
        return {name: metric.result() for name, metric in self.reports.items()}

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            error = tf.reduce_mean((predicted - y) ** 2)
            penalty = tf.reduce_mean(predicted**2)
            loss = error + 0.1 * penalty
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        for name, value in (("loss", loss), ("error", error), ("penalty", penalty)):
            self.reports[name].update_state(value)
        return self.report(y, predicted)


def reporting(case, **kwargs):
    x, y, _ = masked_data()
    model = Reporting(case)
    model.compile("sgd", **kwargs)
    return raised_by(lambda: model.fit(x, y, batch_size=8, verbose=0))


def case_reported_by_a_step():
    return reporting("graph")


def case_reported_by_a_step_eagerly():
    return reporting("eager", run_eagerly=True)


class ReportingInLogs(Reporting):
    """Returns the numbers themselves."""

    @property
    def metrics(self):
        return []

    def report(self, y, predicted):
        hits = tf.cast(predicted > 0, tf.float32)
        return {
            "right": tf.reduce_mean(tf.cast(tf.equal(hits, y), tf.float32)),
            "squares": tf.reduce_sum((predicted - y) ** 2),
            f"precision_{self.case}": tf.reduce_mean(hits * y) / tf.reduce_mean(hits),
            f"deviation_{self.case}": tf.math.reduce_std(predicted),
            "rate": self.optimizer.learning_rate,
            "steps": self.optimizer.iterations,
            "constant": 1.5,
        }

    def test_step(self, data):
        x, y = data
        return self.report(y, self(x))


def reporting_in_logs(case, **kwargs):
    x, y, _ = masked_data()
    model = ReportingInLogs(case)
    model.compile("sgd", **kwargs)
    found = raised_by(lambda: model.fit(x, y, batch_size=8, verbose=0))
    seen = model.evaluate(x[:9], y[:9], batch_size=9, verbose=0, return_dict=True)
    squares = ((model.predict_on_batch(x[:9]) - y[:9]) ** 2).sum()
    # The sum over all rows, not that of one rank.
    assert abs(seen["squares"] - squares) < 1e-4 * squares
    return found


def case_reported_in_logs():
    return reporting_in_logs("graph")


def case_reported_in_logs_eagerly():
    return reporting_in_logs("eager", run_eagerly=True)


def case_reported_by_a_loop():
    model = Reporting("loop")
    model.compile("sgd")
    model.build((None, 6))
    step = tf.function(lambda x, y: model.train_step((x, y)))

    def run():
        for x, y, _ in batches():
            step(x, y)

    return raised_by(run)


def case_no_loop_with_a_mask_of_keras():
    """Keras divides by the sum of the mask, and tfcluster by the sum over all ranks."""
    model, optimizer = network(), keras.optimizers.SGD(0.01)
    loss_of = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")

    def step(x, y, mask):
        with tf.GradientTape() as tape:
            predicted = model(x, training=True)
            loss = loss_of(y[..., None], predicted[..., None], sample_weight=mask)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    for function in (tf.function(step), step):
        for batch in batches():
            function(*batch)
    return {"raised": np.array("nothing")}


def case_no_loop_over_arrays():
    """Arrays are not divided: every rank sees all rows of the mask.

    The last case, because the loop after it would not be divided, either.
    """
    x, y, mask = masked_data()
    model, optimizer = network(), keras.optimizers.SGD(0.01)

    @tf.function
    def step(x, y, mask):
        with tf.GradientTape() as tape:
            loss = masked_mean(y, model(x, training=True), mask)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    for start in range(0, 40, 8):
        rows = slice(start, start + 8)
        step(*(tf.constant(array[rows]) for array in (x, y, mask)))
    return {"raised": np.array("nothing")}


if __name__ == "__main__":
    main(globals())
