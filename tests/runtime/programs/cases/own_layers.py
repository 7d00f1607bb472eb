# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Layers and steps of a script that see, count or keep something of a whole batch."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.runtime.programs.cases.tools import data, main, results


def fitting(*layers, kind=keras.Sequential, rows=42, shape=(6,), **kwargs):
    """Fit the layers between two others; the last batch has two rows."""
    x, y = data(rows)
    first = [keras.layers.Dense(6, kernel_regularizer="l2")] if shape == (6,) else []
    model = kind([keras.Input(shape), *first, *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", **kwargs)
    targets = y.astype("float32")[:, None]
    x = x.reshape(-1, *shape)
    return results(model, model.fit(x, targets, batch_size=8, epochs=2, verbose=0))


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            loss += tf.add_n([*map(tf.reduce_mean, self.losses), 0.0])
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


# --- layers that see the batch --------------------------------------------------------


class SpreadOfTheBatch(keras.layers.Layer):
    """Appends the standard deviation over all rows to each row, as some critics do."""

    def call(self, x):
        spread = tf.reduce_mean(tf.math.reduce_std(x, 0))
        return tf.concat([x, tf.fill((tf.shape(x)[0], 1), spread)], -1)


def case_spread_of_the_batch():
    return fitting(SpreadOfTheBatch())


def case_attention_over_the_batch():
    """Written with ``keras.ops``."""
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "tanh")(inputs)
    alike = keras.ops.softmax(keras.ops.matmul(hidden, keras.ops.transpose(hidden)))
    outputs = keras.layers.Dense(1)(keras.ops.matmul(alike, hidden))
    model = keras.Model(inputs, outputs)
    x, y = data(42)
    model.compile("sgd", "mse")
    return results(model, model.fit(x, y[:, None], batch_size=8, verbose=0))


def case_transformer_layer():
    class Block(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            # The bias of the keys would have no gradient but rounding.
            self.attention = keras.layers.MultiHeadAttention(
                2, 3, dropout=0.1, use_bias=False
            )
            self.normalization = keras.layers.LayerNormalization()

        def call(self, x):
            return self.normalization(x + self.attention(x, x))

    reshaped = keras.layers.Reshape((3, 2))
    return fitting(reshaped, Block(), keras.layers.Flatten())


def case_constant_number_of_rows():
    """The model reshapes to a constant number of rows, and the step adds so many."""

    class Translating(OwnStep):
        def train_step(self, data):
            x, y = data
            return super().train_step(
                (x + tf.concat([x[:, 2:], tf.zeros((8, 2))], 1), y)
            )

    reshaped = keras.layers.Lambda(lambda x: tf.reshape(x, (8, 3, 2)))
    return fitting(reshaped, keras.layers.Flatten(), kind=Translating, rows=40)


def case_constant_batch_shape():
    model = keras.Sequential([keras.Input(batch_shape=(8, 6)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = data(40)
    return results(model, model.fit(x, y[:, None], batch_size=8, verbose=0))


# --- losses of layers -----------------------------------------------------------------


class Adding(keras.layers.Layer):
    """Calls ``add_loss`` with ``reduce`` of the squared inputs."""

    def __init__(self, reduce, only_training=False):
        super().__init__()
        self.reduce, self.only_training = reduce, only_training

    def call(self, x, training=False):
        if training or not self.only_training:
            self.add_loss(0.01 * self.reduce(keras.ops.square(x)))
        return x


def per_row(squares):
    """Keras's step adds the numbers of all rows up; ``OwnStep`` takes their mean."""
    return keras.ops.mean(squares, axis=-1, keepdims=True)


def case_added_losses():
    return fitting(
        keras.layers.Dropout(0.5),
        Adding(keras.ops.sum),
        Adding(keras.ops.sum, only_training=True),
        Adding(keras.ops.mean),
        Adding(per_row),
        Adding(lambda x: keras.ops.sqrt(keras.ops.sum(x))),
    )


def case_added_losses_in_a_custom_step():
    return fitting(Adding(keras.ops.sum), Adding(per_row), kind=OwnStep)


def case_added_losses_eagerly():
    return fitting(Adding(keras.ops.sum), Adding(per_row), run_eagerly=True)


# --- other gradients ------------------------------------------------------------------


class Backward(keras.layers.Layer):
    """The identity, with another gradient."""

    def __init__(self, gradient):
        super().__init__()

        @tf.custom_gradient
        def identity(x):
            return tf.identity(x), gradient

        self.identity = identity

    def call(self, inputs):
        return self.identity(inputs)


def case_changed_backwards():
    """By each number of a gradient, by all of its numbers, and by none of them."""
    return fitting(
        Backward(lambda upstream: -3.0 * upstream),
        Backward(lambda upstream: upstream / tf.norm(upstream)),
        Backward(lambda upstream: tf.clip_by_value(upstream, -0.1, 0.1)),
    )


def case_changed_backwards_in_a_loop():
    class Cell(keras.layers.SimpleRNNCell):
        def build(self, shape):
            super().build(shape)
            self.backward = Backward(lambda upstream: -0.3 * upstream)

        def call(self, inputs, states, training=False):
            output, _ = super().call(inputs, states, training=training)
            return self.backward(output), [output]

    return fitting(keras.layers.RNN(Cell(4)), shape=(6, 1))


# --- states ---------------------------------------------------------------------------


class Keeping(keras.layers.Layer):
    """Divides by its largest row so far, and keeps the spread of the batch."""

    def build(self, shape):
        kept = {"shape": (shape[-1],), "initializer": "ones", "trainable": False}
        self.largest = self.add_weight(name="largest", **kept)
        self.spread = self.add_weight(name="spread", **kept)

    def call(self, x):
        self.spread.assign(tf.math.reduce_std(x, 0))
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(x, 0)))
        return x / self.largest


def case_kept_and_used_in_one_step():
    return fitting(Keeping())


def case_states_of_rows():
    """An LSTM whose states are those of the rows of the last batch."""
    x = data(40)[0].reshape(20, 6, 2)
    found: dict[str, Any] = {}
    for name, kind in (("keras", keras.Sequential), ("own", OwnStep)):
        recurrent = keras.layers.LSTM(2, stateful=True)
        given = keras.Input((6, 2), batch_size=4)
        model = kind([given, recurrent, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        kwargs = {"batch_size": 4, "shuffle": False, "verbose": 0}
        history = model.fit(x, x[:, 0, :1], epochs=2, **kwargs)
        found |= {f"{name}_{k}": v for k, v in results(model, history).items()}
        found[f"{name}_predicted"] = model.predict(x, batch_size=4, verbose=0)
    return found


def case_counted_in_a_step():
    class Counting(OwnStep):
        def build(self, shape):
            super().build(shape)
            kept = {"initializer": "zeros", "trainable": False}
            self.seen = self.add_weight(name="seen", **kept)
            self.summed = self.add_weight(name="summed", aggregation="sum", **kept)

        def train_step(self, data):
            for counter in (self.seen, self.summed):
                counter.assign_add(tf.cast(tf.shape(data[0])[0], "float32"))
            return super().train_step(data)

    return fitting(keras.layers.Dense(4), kind=Counting)


def case_weights_changed_by_hand():
    """A step without a tape or an optimizer, by finite differences."""

    class ByHand(OwnStep):
        def train_step(self, data):
            x, y = data
            loss = tf.reduce_mean((self(x) - y) ** 2)
            for weight in self.trainable_variables:
                weight.assign_add(tf.fill(weight.shape, 0.1))
                slope = (tf.reduce_mean((self(x) - y) ** 2) - loss) / 0.1
                weight.assign_sub(tf.fill(weight.shape, 0.1 + 0.01 * slope))
            return {"loss": loss}

    return fitting(kind=ByHand)


class Contrast(keras.Model):
    """Compares two views of a row with a queue of earlier rows, and counts."""

    def __init__(self):
        super().__init__()
        make = [keras.Input((6,)), keras.layers.Dense(4)]
        self.encoder, self.slow = (
            keras.Sequential(make),
            keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)]),
        )
        start = tf.math.l2_normalize(tf.random.normal((32, 4)), 1)
        self.queue = tf.Variable(start, trainable=False, name="queue")
        self.centres = tf.Variable(start[:2], trainable=False, name="centres")
        self.losses_so_far = tf.Variable(0.0, trainable=False, name="total")
        self.steps = tf.Variable(0, trainable=False, name="steps")
        self.generator = tf.random.Generator.from_seed(3)

    def train_step(self, batch):
        one, other = batch
        weights = self.encoder.trainable_variables
        with tf.GradientTape() as tape:
            found = tf.math.l2_normalize(self.encoder(one, training=True), 1)
            keys = tf.math.l2_normalize(self.slow(other, training=True), 1)
            close = tf.reduce_sum(found * keys, 1)
            away = tf.concat([self.queue, self.centres], 0)
            away = tf.reduce_logsumexp(found @ tf.transpose(away), 1)
            loss = tf.reduce_mean(away - close)
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.keep(loss, keys)
        return {"loss": loss}

    def keep(self, loss, keys):
        for fast, slow in zip(self.encoder.weights, self.slow.weights, strict=True):
            slow.assign(0.9 * slow + 0.1 * fast)
        self.steps.assign_add(1)
        self.losses_so_far.assign_add(loss + tf.reduce_sum(self.generator.normal([2])))
        classes = tf.cast(tf.reduce_sum(keys, 1) > 0, tf.int32)
        away = tf.gather(self.centres, classes) - keys
        self.centres.scatter_sub(tf.IndexedSlices(0.1 * away, classes))
        kept = self.queue[:-16]
        self.queue[16:].assign(kept)
        self.queue[: tf.shape(keys)[0]].assign(keys)


def contrasted(train):
    rows, _ = data(64)
    model = Contrast()
    train(model, tf.data.Dataset.from_tensor_slices((rows, rows * 0.9)).batch(16))
    kept = (model.queue, model.centres, model.losses_so_far, model.steps)
    encoders = [model.encoder, model.slow]
    weights = [weight for each in encoders for weight in each.get_weights()]
    return {variable.name: variable.numpy() for variable in kept} | {
        f"w{i}": weight for i, weight in enumerate(weights)
    }


def case_queue_in_variables():
    def train(model, batches):
        model.compile(keras.optimizers.SGD(0.05))
        model.fit(batches, epochs=2, verbose=0)

    return contrasted(train)


def case_queue_in_variables_of_a_loop():
    def train(model, batches):
        model.compile(keras.optimizers.SGD(0.05))
        model.optimizer.build(model.encoder.trainable_variables)
        step = tf.function(model.train_step)
        for batch in batches:
            step(batch)

    return contrasted(train)


# --- numbers that a step draws or returns ---------------------------------------------


class Draws(keras.layers.Layer):
    """Changes its rows by what ``change`` does in training."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def call(self, x, training=False):
        if not training:
            return x
        return tf.ensure_shape(self.change(x), [None, 5, 3])


def case_drawn_for_each_row():
    """Loops over rows, and loops over steps of time.

    One iteration at a time: otherwise one process may draw in another order every time.
    """
    seeds = keras.random.SeedGenerator(3)

    def mapped(x):
        return tf.map_fn(
            lambda row: row * tf.random.uniform([]), x, parallel_iterations=1
        )

    def vectorized(x):
        return tf.vectorized_map(lambda row: row * tf.random.uniform([]), x)

    def of_keras(x):
        def drawn(row):
            return row * keras.random.uniform([], seed=seeds)

        return tf.map_fn(drawn, x, parallel_iterations=1)

    @tf.function
    def iterated(x):
        total = tf.zeros([5, 3])
        for row in x:
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            total += row * tf.random.uniform([])
        return x + total

    @tf.function
    def counted(x):
        for time in tf.range(5):
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            x += x[:, time, None] * tf.random.uniform([])
        return x

    x = np.random.default_rng(4).normal(size=(24, 5, 3)).astype("float32")
    found: dict[str, Any] = {}
    for change in (mapped, vectorized, of_keras, iterated, counted):
        layers = [Draws(change), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5, 3)), *layers])
        model.compile("sgd", "mse")
        history = model.fit(x, x[:, 0, :1], batch_size=12, verbose=0)
        found |= {
            f"{change.__name__}_{key}": each
            for key, each in results(model, history).items()
        }
    return found


class Reporting(keras.Model):
    """Its metrics and logs get means of rows, sums and others."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(1)
        names = ("loss", "penalty", "right", "precision", "deviation")
        self.reports = {name: keras.metrics.Mean(name) for name in names}

    @property
    def metrics(self):
        return list(self.reports.values())

    def call(self, x, training=False):
        return self.inner(x)

    def report(self, y, predicted):
        hits = tf.cast(predicted > 0, tf.float32)
        right = tf.cast(tf.equal(hits, y), tf.float32)
        precision = tf.math.divide_no_nan(tf.reduce_sum(hits * y), tf.reduce_sum(hits))
        self.reports["right"].update_state(tf.reduce_mean(right))
        self.reports["precision"].update_state(precision)
        self.reports["deviation"].update_state(tf.math.reduce_std(predicted))
        return {name: metric.result() for name, metric in self.reports.items()} | {
            "squares": tf.reduce_sum((predicted - y) ** 2),
            "last_precision": tf.reduce_sum(hits * y) / (1 + tf.reduce_sum(hits)),
            "rate": self.optimizer.learning_rate,
            "steps": self.optimizer.iterations,
            "constant": 1.5,
        }

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            penalty = tf.reduce_mean(predicted**2)
            loss = tf.reduce_mean((predicted - y) ** 2) + 0.1 * penalty
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.reports["loss"].update_state(loss)
        self.reports["penalty"].update_state(penalty)
        return self.report(y, predicted)

    def test_step(self, data):
        x, y = data
        return self.report(y, self(x))


def case_reported_by_a_step():
    x, y = data(42)
    targets = y.astype("float32")[:, None]
    model = Reporting()
    model.compile("sgd")
    kwargs = {"batch_size": 8, "verbose": 0}
    history = model.fit(x, targets, epochs=2, **kwargs)
    logs = model.evaluate(x, targets, return_dict=True, **kwargs)
    # Not called evaluate: some of the numbers are sums, not means, of a batch.
    return results(model, history) | {f"test_{k}": np.array(v) for k, v in logs.items()}


if __name__ == "__main__":
    main(globals())
