# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Programs that would not train what one machine trains: they are refused."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.runtime.programs.cases.tools import (
    classifier,
    compiled,
    data,
    main,
    raised_by,
)


def fitting(loss, rows=40, **kwargs):
    x, y = data(rows)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", loss, **kwargs)
    return lambda: model.fit(x, y.astype("float32")[:, None], verbose=0)


def case_unlike_data():
    """The data come from a random generator without a common seed.

    Must be the first case: the more steps a process has run, the fewer are compared.
    """
    generator = np.random.default_rng()
    x = generator.normal(size=(40, 6))
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return raised_by(lambda: model.fit(x, x[:, :1], batch_size=8, verbose=0))


def case_strategies_of_clusters():
    return raised_by(tf.distribute.MultiWorkerMirroredStrategy)


def case_experimental_strategies():
    return raised_by(tf.distribute.experimental.MultiWorkerMirroredStrategy)


def case_parameter_servers():
    return raised_by(lambda: tf.distribute.ParameterServerStrategy(None))


def case_two_replicas():
    return raised_by(lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))


def case_one_replica():
    """A strategy with one replica is harmless."""
    x, y = data(40)

    def fit():
        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            model = compiled(classifier())
        model.fit(x, y, verbose=0)

    return raised_by(fit)


def stateful(kind):
    model = kind(
        [
            keras.Input((3, 2), batch_size=4),
            keras.layers.LSTM(2, stateful=True),
            keras.layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse")
    return model


class CustomStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def case_states_of_rows():
    """A trial of the custom step would give a rank other rows than its states have."""
    model = stateful(CustomStep)
    x = np.ones((8, 3, 2), "float32")
    found = raised_by(lambda: model.fit(x, x[:, 0, :1], batch_size=4, verbose=0))
    # predict does not divide batches.
    found["predicted"] = model.predict(x, batch_size=4, verbose=0)
    return found


def case_states_of_other_rows():
    """As on one machine, all batches need the number of rows that the states have."""
    model = stateful(keras.Sequential)
    x = np.ones((6, 3, 2), "float32")
    return raised_by(lambda: model.fit(x, x[:, 0, :1], batch_size=4, verbose=0))


def case_batch_shape_that_does_no_harm():
    model = keras.Sequential([keras.Input(batch_shape=(8, 6)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = data(40)
    return raised_by(lambda: model.fit(x, y[:, None], batch_size=8, verbose=0))


def case_function_that_sums():
    def total(y_true, y_pred):
        return keras.ops.sum(keras.ops.square(y_true - y_pred))

    return raised_by(fitting(total))


def case_function_that_sums_eagerly():
    def total(y_true, y_pred):
        return tf.reduce_sum((y_true - y_pred) ** 2)

    return raised_by(fitting(total, run_eagerly=True))


class Adding(keras.layers.Layer):
    """Calls ``add_loss`` with ``reduce`` of the squared inputs."""

    def __init__(self, reduce, only_training=False, **kwargs):
        super().__init__(**kwargs)
        self.reduce, self.only_training = reduce, only_training

    def call(self, x, training=False):
        if training or not self.only_training:
            self.add_loss(0.01 * self.reduce(keras.ops.square(x)))
        return x


def fitting_with(layer, kind=keras.Sequential, dropout=0.5, **kwargs):
    x, y = data(40)
    model = kind(
        [
            keras.Input((6,)),
            keras.layers.Dense(4, kernel_regularizer="l2"),
            keras.layers.Dropout(dropout),
            layer,
            keras.layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse", **kwargs)
    return lambda: model.fit(x, y.astype("float32")[:, None], verbose=0)


def case_added_sum():
    return raised_by(fitting_with(Adding(keras.ops.sum, name="penalty")))


def case_added_sum_eagerly():
    layer = Adding(keras.ops.sum, name="penalty")
    return raised_by(fitting_with(layer, run_eagerly=True))


def per_row(squares):
    return keras.ops.mean(squares, axis=-1, keepdims=True)


def case_added_number_for_each_row():
    """Keras's step adds them up."""
    return raised_by(fitting_with(Adding(per_row, name="penalty")))


class MeanOfAdded(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            for added in self.losses:
                loss += tf.reduce_mean(added)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def case_added_number_for_each_row_of_which_a_step_takes_the_mean():
    layer = Adding(per_row, name="penalty")
    return raised_by(fitting_with(layer, MeanOfAdded, dropout=0.0))


def case_added_sum_in_training_only():
    """Checked as in training, but without dropout, which would change the numbers."""
    layer = Adding(keras.ops.sum, only_training=True, name="penalty")
    return raised_by(fitting_with(layer, dropout=0.0))


class OwnStep(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            loss += tf.add_n([*self.losses, 0.0])
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def case_added_sum_in_a_custom_step():
    layer = Adding(keras.ops.sum, name="penalty")
    return raised_by(fitting_with(layer, OwnStep))


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


def case_clipped_backwards():
    layer = Backward(lambda upstream: tf.clip_by_value(upstream, -0.01, 0.01))
    return raised_by(fitting_with(layer))


def case_clipped_backwards_eagerly():
    layer = Backward(lambda upstream: upstream / tf.norm(upstream))
    return raised_by(fitting_with(layer, run_eagerly=True))


def case_reversed_backwards():
    return raised_by(fitting_with(Backward(lambda upstream: -0.3 * upstream)))


class ReversingCell(keras.layers.SimpleRNNCell):
    def build(self, shape):
        super().build(shape)
        self.backward = Backward(lambda upstream: -0.3 * upstream)

    def call(self, inputs, states, training=False):
        output, _ = super().call(inputs, states, training=training)
        return self.backward(output), [output]


def case_reversed_backwards_in_a_loop():
    x, y = data(40)
    recurrent = keras.layers.RNN(ReversingCell(4))
    layers = [keras.Input((6, 1)), recurrent, keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    given = x[:, :, None], y.astype("float32")[:, None]
    return raised_by(lambda: model.fit(*given, verbose=0))


def case_added_mean():
    return raised_by(fitting_with(Adding(keras.ops.mean)))


def case_added_root():
    """Neither mean nor sum."""
    layer = Adding(lambda x: keras.ops.sqrt(keras.ops.sum(x)), name="root")
    return raised_by(fitting_with(layer))


def loop(after_batch):
    """A custom loop that calls ``after_batch`` after each step."""
    x, _ = data(60)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, name="last")])
    optimizer = keras.optimizers.SGD(0.1, name="descent", momentum=0.5)

    @tf.function
    def step(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(rows) - 1) ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    def run():
        for _ in range(4):
            for rows in tf.data.Dataset.from_tensor_slices(x).batch(5):
                after_batch(model, optimizer, float(step(rows)))

    return raised_by(run)


def case_rate_by_its_own_loss():
    """Every rank has a different loss: the mean over its own rows."""

    def decide(model, optimizer, loss):
        if int(optimizer.iterations) == 20:
            optimizer.learning_rate = 0.01 * loss

    return loop(decide)


def case_momentum_by_its_own_loss():
    """The momentum is a plain Python number; traced graphs do not see the change."""

    def decide(model, optimizer, loss):
        if int(optimizer.iterations) == 20:
            optimizer.momentum = loss

    return loop(decide)


def case_weights_by_its_own_loss():
    def decide(model, optimizer, loss):
        if int(optimizer.iterations) == 20:
            model.layers[-1].kernel.assign_add(loss * tf.ones((6, 1)))

    return loop(decide)


def case_changes_that_all_ranks_make():
    """All ranks set the same rates and weights, NaN among them."""

    def decide(model, optimizer, loss):
        step = int(optimizer.iterations)
        optimizer.learning_rate = 0.1 / step
        if step == 10:
            model.layers[-1].kernel.assign(tf.zeros((6, 1)))
        if step == 20:
            model.layers[-1].bias.assign([np.nan])

    return loop(decide)


class Spread(keras.layers.Layer):
    """Keeps a statistic of the batch that does not follow from those of its parts."""

    def build(self, shape):
        self.spread = self.add_weight(
            name="spread", shape=(shape[-1],), initializer="zeros", trainable=False
        )

    def call(self, x):
        self.spread.assign(tf.math.reduce_std(x, 0))
        return x


def case_spread_kept_by_a_layer():
    x = np.random.default_rng(4).normal(size=(40, 6))
    model = keras.Sequential([keras.Input((6,)), Spread(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return raised_by(lambda: model.fit(x, x[:, :1], batch_size=8, verbose=0))


class DividesByItsMaximum(keras.layers.Layer):
    """Uses its state in the same step whose rows have changed it."""

    def build(self, shape):
        self.largest = self.add_weight(
            name="largest", initializer="ones", trainable=False
        )

    def call(self, x):
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(x)))
        return x / self.largest


def case_divided_by_its_maximum():
    x = np.random.default_rng(4).normal(size=(40, 6)).astype("float32") * 3
    layers = [DividesByItsMaximum(name="scaling"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile("sgd", "mse")
    return raised_by(lambda: model.fit(x, x[:, :1], batch_size=8, verbose=0))


def case_changed_gradients_of_a_graph():
    """``tf.gradients`` returns the gradient of this rank's rows only."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, name="last")])
    optimizer = keras.optimizers.SGD(0.1)
    x = np.random.default_rng(4).normal(size=(40, 6)).astype("float32")

    @tf.function
    def step(rows):
        loss = tf.reduce_mean((model(rows) - 1.0) ** 2)
        weights = model.trainable_variables
        gradients = tf.gradients(loss, [weight.value for weight in weights])
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        optimizer.apply(gradients, weights)

    def loop():
        for rows in tf.data.Dataset.from_tensor_slices(x).batch(8):
            step(rows)

    return raised_by(loop)


def case_endless_epoch():
    """An infinite epoch that only the callback ends."""

    def stop(batch, logs):
        if batch == 2:
            raise RuntimeError("enough")

    x = np.random.default_rng(4).normal(size=(40, 6)).astype("float32")
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    batches = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8).repeat()
    calls = [keras.callbacks.LambdaCallback(on_train_batch_end=stop)]
    return raised_by(lambda: model.fit(batches, callbacks=calls, verbose=0))


def case_shuffled_rows():
    """A step that mixes each row with another one of its batch."""
    x = np.random.default_rng(4).normal(size=(40, 6)).astype("float32")
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x + tf.random.shuffle(x)) ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    def loop():
        for rows in tf.data.Dataset.from_tensor_slices(x).batch(8):
            step(rows)

    return raised_by(loop)


def case_learned_classes():
    """Classes are sampled by how often the batches had them."""
    words = np.random.default_rng(6).integers(0, 20, (40, 1))
    weights, biases = tf.Variable(tf.ones([20, 3])), tf.Variable(tf.zeros([20]))
    optimizer = keras.optimizers.SGD(0.1)

    @tf.function
    def step(words):
        x = tf.one_hot(words[:, 0] % 3, 3)
        with tf.GradientTape() as tape:
            sampled = tf.random.learned_unigram_candidate_sampler(words, 1, 5, True, 20)
            losses = tf.nn.nce_loss(
                weights, biases, words, x, 5, 20, sampled_values=sampled
            )
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, [weights, biases])
        pairs = zip(gradients, [weights, biases], strict=True)
        optimizer.apply_gradients(pairs)

    def loop():
        for batch in tf.data.Dataset.from_tensor_slices(words).batch(8):
            step(batch)

    return raised_by(loop)


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
    """Loops over rows, and loops over steps of time, which differ from them."""
    seeds = keras.random.SeedGenerator(3)

    def mapped(x):
        return tf.map_fn(lambda row: row * tf.random.uniform([]), x)

    def vectorized(x):
        return tf.vectorized_map(lambda row: row * tf.random.uniform([]), x)

    def of_keras(x):
        return tf.map_fn(lambda row: row * keras.random.uniform([], seed=seeds), x)

    @tf.function
    def iterated(x):
        total = tf.zeros([5, 3])
        for row in x:
            total += row * tf.random.uniform([])
        return x + total

    @tf.function
    def counted(x):
        for time in tf.range(5):
            x += x[:, time, None] * tf.random.uniform([])
        return x

    def stepped(x):
        by_time = tf.transpose(x, [1, 0, 2])
        drawn = tf.map_fn(lambda one: one * tf.random.uniform([]), by_time)
        return tf.transpose(drawn, [1, 0, 2])

    x = np.random.default_rng(4).normal(size=(24, 5, 3)).astype("float32")

    def train():
        for change in (mapped, vectorized, of_keras, iterated, counted, stepped):
            layers = [Draws(change), keras.layers.Flatten(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((5, 3)), *layers])
            model.compile("sgd", "mse")
            model.fit(x, x[:, 0, :1], batch_size=12, verbose=0)

    return raised_by(train)


def masked_loss(function):
    x, _ = data(42)
    mask = np.random.default_rng(2).integers(1, 6, 42).astype("float32")
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)

    @function
    def step(rows, kept):
        with tf.GradientTape() as tape:
            errors = (model(rows)[:, 0] - 1) ** 2
            loss = tf.reduce_sum(errors * kept) / tf.reduce_sum(kept)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    def loop():
        for rows, kept in tf.data.Dataset.from_tensor_slices((x, mask)).batch(8):
            step(rows, kept)

    return raised_by(loop)


def case_masked_loss():
    return masked_loss(lambda step: step)


def case_gradients_of_gradients():
    """One step of MAML on the whole batch."""
    x, _ = data(42)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    weights = model.trainable_variables

    def loss_of(rows, kernel, bias):
        return tf.reduce_mean((rows @ kernel + bias - 1) ** 2)

    def loop():
        for rows in tf.data.Dataset.from_tensor_slices(x).batch(8):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    loss = loss_of(rows, *weights)
                found = inner.gradient(loss, weights)
                moved = [w - 0.1 * g for w, g in zip(weights, found, strict=True)]
                loss = loss_of(rows, *moved)
            optimizer.apply(outer.gradient(loss, weights), weights)

    return raised_by(loop)


class CountsInItsStep(OwnStep):
    """Counts rows in its step, in a weight without ``aggregation``."""

    aggregation = ""

    def build(self, shape):
        super().build(shape)
        kept = {"name": "seen", "initializer": "zeros", "trainable": False}
        if self.aggregation:
            kept["aggregation"] = self.aggregation
        self.seen = self.add_weight(**kept)

    def train_step(self, data):
        logs = super().train_step(data)
        self.seen.assign_add(tf.cast(tf.shape(data[0])[0], "float32"))
        return logs


class CountsAsDeclared(CountsInItsStep):
    aggregation = "sum"


def counting(kind):
    x = np.random.default_rng(4).normal(size=(43, 6)).astype("float32")
    model = kind([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    found = raised_by(lambda: model.fit(x, x[:, :1], batch_size=8, verbose=0))
    return {**found, "said": model.seen.numpy()}


def case_counted_in_a_step():
    return counting(CountsInItsStep)


def case_counted_as_declared():
    return counting(CountsAsDeclared)


if __name__ == "__main__":
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 2,
    )
    main(globals())
