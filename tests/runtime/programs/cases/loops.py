# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Training loops without ``fit``."""

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


def tape_loop(compile_step):
    x, y = data(96)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(96, seed=3).batch(10)
    model = classifier()
    optimizer = keras.optimizers.Adam(0.01)
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    def step(x, y):
        with tf.GradientTape() as tape:
            probabilities = model(x, training=True)
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(y, probabilities)
            )
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        accuracy.update_state(y, probabilities)
        return tf.shape(x)[0]

    if compile_step:
        step = tf.function(step)
    accuracies, rows = [], []
    for _ in range(3):
        accuracy.reset_state()
        for batch in dataset.prefetch(2):
            rows.append(int(step(*batch)))
        accuracies.append(float(accuracy.result()))
    again = float(accuracy.result())
    seen = np.concatenate([model(x).numpy() for x, _ in dataset])
    return {
        **results(model),
        "accuracies": np.array(accuracies),
        "again": np.array(again),
        "seen": np.array(len(seen)),
        "rows": np.array(rows),
    }


def case_tape_eager():
    return tape_loop(compile_step=False)


def case_tape_graph():
    return tape_loop(compile_step=True)


def loop_with_noise(compile_step):
    """Dropout, and noise of Keras and of TensorFlow, in a loop of the program's own."""
    x, y = data()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    noise = keras.layers.GaussianNoise(0.1)
    model = classifier(keras.layers.Dropout(0.4))
    optimizer = keras.optimizers.SGD(0.1)

    def noisy_step(x, y, number):
        shift = tf.random.stateless_normal(tf.shape(x), tf.stack([3, number]))
        x = noise(x, training=True) + 0.1 * tf.cast(shift, x.dtype)
        with tf.GradientTape() as tape:
            loss = keras.losses.sparse_categorical_crossentropy(
                y, model(x, training=True)
            )
            loss = tf.reduce_mean(loss)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    step = tf.function(noisy_step) if compile_step else noisy_step
    for epoch in range(2):
        for number, (rows, labels) in enumerate(dataset):
            step(rows, labels, tf.constant(10 * epoch + number))
    return results(model)


def loop_with_batch_normalization(function):
    x, y = data(46)
    model = classifier(keras.layers.BatchNormalization(momentum=0.8))
    optimizer = keras.optimizers.SGD(0.1)

    @function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(y, model(x, training=True))
            )
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    for _ in range(2):
        for batch in tf.data.Dataset.from_tensor_slices((x, y)).batch(8):
            step(*batch)
    return results(model)


def case_tape_with_batch_normalization():
    return loop_with_batch_normalization(tf.function)


def case_tape_with_batch_normalization_eagerly():
    return loop_with_batch_normalization(lambda step: step)


def case_tape_with_noise():
    return loop_with_noise(compile_step=True)


def case_tape_with_noise_eagerly():
    return loop_with_noise(compile_step=False)


def case_tape_on_arrays():
    """There is no dataset to divide: every rank computes the same."""
    x, y = data(48)
    model = classifier()
    optimizer = keras.optimizers.SGD(0.1)
    mean = keras.metrics.Mean()
    total = keras.metrics.Sum()
    for start in range(0, 48, 12):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(
                    y[start : start + 12], model(x[start : start + 12])
                )
            )
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        mean.update_state(loss)
        total.update_state(12.0)
    return {
        **results(model),
        "mean": np.array(float(mean.result())),
        "total": np.array(float(total.result())),
    }


def numpy_batches(dataset, module):
    """What a function of another module yields, which loops over ``dataset``."""
    code = "def found(dataset):\n    for batch in dataset:\n        yield batch"
    names = {"__name__": module}
    exec(code, names)
    return (tf.nest.map_structure(np.array, each) for each in names["found"](dataset))


def case_tape_on_arrays_of_a_dataset():
    """The program standardises each batch by numpy, so every rank needs all rows."""
    x, y = data(46)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(46, seed=3).batch(8)
    model = classifier()
    optimizer = keras.optimizers.Adam(0.01)
    rows = keras.metrics.Sum()
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    def train(passes):
        for xs, ys in passes:
            xs = (xs - xs.mean(0)) / (xs.std(0) + 1e-6)
            with tf.GradientTape() as tape:
                probabilities = model(xs, training=True)
                loss = tf.reduce_mean(
                    keras.losses.sparse_categorical_crossentropy(ys, probabilities)
                )
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
            rows.update_state(len(xs))
            accuracy.update_state(ys, probabilities)

    for _ in range(2):
        train(batches.as_numpy_iterator())
        train(numpy_batches(batches, "tensorflow_datasets.core.dataset_utils"))
    return {
        **results(model),
        "rows": np.array(float(rows.result())),
        "accuracy": np.array(float(accuracy.result())),
    }


def case_tape_in_one_function():
    """One call of a ``tf.function`` is a whole epoch."""
    x, y = data(90)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8).prefetch(2)
    model = classifier()
    optimizer = keras.optimizers.Adam(0.01)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    def step(x, y):
        with tf.GradientTape() as tape:
            probabilities = model(x, training=True)
            loss = loss_of(y, probabilities)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        accuracy.update_state(y, probabilities)

    @tf.function
    def epoch():
        for x, y in batches:
            step(x, y)

    accuracies = []
    for _ in range(4):
        accuracy.reset_state()
        epoch()
        accuracies.append(float(accuracy.result()))
    return {**results(model), "accuracies": np.array(accuracies)}


def case_tape_with_metrics_around_it():
    """Metrics of another dataset within the loop, and of all data after it."""
    x, y = data(46)
    y = y.astype("float32")[:, None]
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, "sigmoid")])
    optimizer = keras.optimizers.SGD(0.1)
    loss_of = keras.losses.BinaryCrossentropy()
    trained, within, after = [keras.metrics.TruePositives() for _ in range(3)]

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            predicted = model(x, training=True)
            loss = loss_of(y, predicted)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        trained.update_state(y, predicted)

    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    others = tf.data.Dataset.from_tensor_slices((x[:20], y[:20])).batch(7)
    for epoch in range(2):
        for number, batch in enumerate(batches):
            if number == 2:
                for rows, labels in others:
                    within.update_state(labels, model(rows))
            step(*batch)
            if epoch and number == 4:
                break
        after.update_state(y, model(x))
    counts = [float(metric.result()) for metric in (trained, within, after)]
    return {**results(model), "counts": np.array(counts)}


def loop_that_gathers(function):
    """A contrastive loss of all rows, and its sum and mean over the batches."""
    x, _ = data(46)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(4),
        ]
    )
    optimizer = keras.optimizers.SGD(0.1)
    kept = [keras.metrics.Mean(), keras.metrics.Sum()]

    @function
    def step(x):
        with tf.GradientTape() as tape:
            one, two = tfc.gather_batch(model(x), model(0.9 * x))
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.range(tf.shape(one)[0]), tf.matmul(one, two, transpose_b=True)
            )
            loss = tf.reduce_mean(losses)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        for metric in kept:
            metric.update_state(loss)
        return loss

    losses = []
    for _ in range(3):
        for batch in tf.data.Dataset.from_tensor_slices(x).batch(8):
            losses.append(float(step(batch)))
    found = [float(metric.result()) for metric in kept]
    return {**results(model), "kept": np.array(found), "losses": np.array(losses)}


def case_tape_that_gathers():
    return loop_that_gathers(tf.function)


def case_tape_that_gathers_eagerly():
    return loop_that_gathers(lambda step: step)


def case_on_batch():
    x, y = data()
    model = compiled(classifier())
    logs = [
        model.train_on_batch(x[i : i + 11], y[i : i + 11]) for i in range(0, 44, 11)
    ]
    tested = model.test_on_batch(x, y, return_dict=True)
    return {
        **results(model),
        "logs": np.array(logs),
        "tested": np.array([tested["loss"], tested["accuracy"]]),
    }


def case_train_on_batch_of_dataset():
    """A loop that calls ``train_on_batch`` is not a custom training loop."""
    x, y = data(60)
    model = compiled(classifier())
    for batch in tf.data.Dataset.from_tensor_slices((x, y)).batch(12):
        model.train_on_batch(*batch)
    return results(model)


def with_two_optimizers(**options):
    x, y = data(40)
    one, two = classifier(), classifier()
    optimizers = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1)

    @tf.function(**options)
    def step(x, y):
        for model, optimizer in zip((one, two), optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(
                    keras.losses.sparse_categorical_crossentropy(y, model(x))
                )
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)

    for batch in tf.data.Dataset.from_tensor_slices((x, y)).batch(8, True).repeat(2):
        step(*batch)
    return {**results(one), "other": two.get_weights()[0]}


def case_two_optimizers():
    return with_two_optimizers()


def case_gan():
    """Two models, two optimizers, and labels and noise made in the step."""

    class Gan(keras.Model):
        def __init__(self):
            super().__init__()
            self.generator = keras.Sequential(
                [keras.Input((3,)), keras.layers.Dense(6, activation="tanh")]
            )
            self.discriminator = keras.Sequential(
                [keras.Input((6,)), keras.layers.Dense(1)]
            )
            self.d_loss = keras.metrics.Mean("d_loss")
            self.g_loss = keras.metrics.Mean("g_loss")

        @property
        def metrics(self):
            return [self.d_loss, self.g_loss]

        def compile(self, d_optimizer, g_optimizer):
            super().compile()
            self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
            self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

        def train_step(self, data):
            # The noise is computed from the rows: a random generator would give each
            # rank different noise, as it does each row.
            noise = data[:, :3] * 0.5
            n = tf.shape(data)[0]
            labels = tf.concat([tf.ones((n, 1)), tf.zeros((n, 1))], 0)
            with tf.GradientTape() as tape:
                both = tf.concat([self.generator(noise), data], 0)
                d_loss = self.loss_fn(labels, self.discriminator(both))
            weights = self.discriminator.trainable_weights
            self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
            with tf.GradientTape() as tape:
                fooled = self.discriminator(self.generator(noise))
                g_loss = self.loss_fn(tf.zeros((n, 1)), fooled)
            weights = self.generator.trainable_weights
            self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)
            self.d_loss.update_state(d_loss)
            self.g_loss.update_state(g_loss)
            return {m.name: m.result() for m in self.metrics}

    x, _ = data(ROWS)
    model = Gan()
    model.compile(keras.optimizers.Adam(0.003), keras.optimizers.Adam(0.003))
    history = model.fit(x, batch_size=16, epochs=EPOCHS, verbose=0)
    return results(model, history)


def loop_with(loss_of, compile_step, epochs=3):
    """Trains on 50 rows in batches of 8 and 2; also returns the means of the loss."""
    x, y = data()
    dataset = tf.data.Dataset.from_tensor_slices(
        (x, y, np.linspace(0.1, 2.0, 50).astype(keras.config.floatx()))
    ).batch(8)
    model = classifier()
    optimizer = keras.optimizers.Adam(0.01)
    mean = keras.metrics.Mean()

    def step(x, y, weight):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True), weight)
        weights = model.trainable_variables
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))
        mean.update_state(loss)

    if compile_step:
        step = tf.function(step, jit_compile=compile_step == "xla")
    means = []
    for _ in range(epochs):
        mean.reset_state()
        for batch in dataset:
            step(*batch)
            means.append(float(mean.result()))
    return {**results(model), "means": np.array(means)}


def case_tape_with_a_sum():
    loss = keras.losses.SparseCategoricalCrossentropy(reduction="sum")
    return loop_with(lambda y, p, w: loss(y, p), compile_step=True)


def case_tape_with_weights():
    loss = keras.losses.SparseCategoricalCrossentropy(
        reduction="mean_with_sample_weight"
    )
    return loop_with(loss, compile_step=False)


def case_tape_with_a_divisor():
    """A sum that the script divides by the nominal batch size."""

    def loss(y, p, w):
        losses = keras.losses.sparse_categorical_crossentropy(y, p)
        return tf.nn.compute_average_loss(losses, global_batch_size=8)

    return loop_with(loss, compile_step=True)


def case_tape_compiled_by_xla():
    loss = keras.losses.SparseCategoricalCrossentropy()
    return loop_with(lambda y, p, w: loss(y, p), compile_step="xla")


def accumulating(batches):
    """The script adds up the gradients of two batches and applies them together."""
    x, y = data(12 * batches)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
    model = classifier()
    optimizer = keras.optimizers.SGD(0.1)
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    weights = model.trainable_variables
    held = []
    for _ in range(4):
        for x, y in dataset:
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x))
            held.append(tape.gradient(loss, weights))
            if len(held) == 2:
                optimizer.apply(
                    [(a + b) / 2 for a, b in zip(*held, strict=True)], weights
                )
                held = []
    return results(model)


def case_tape_accumulates():
    return accumulating(6)


def case_tape_accumulates_across_passes():
    """Adds up the last batch of an epoch and the first batch of the next one."""
    return accumulating(3)


class Words(keras.Model):
    """Creates its variables when it is first called."""

    def __init__(self):
        super().__init__()
        self.words = keras.layers.Embedding(12, 3)
        self.out = keras.layers.Dense(2, activation="softmax")

    def call(self, x):
        return self.out(keras.ops.mean(self.words(x), 1))


def case_tape_builds_its_model():
    """The first step creates the variables, and the optimizer scales the loss.

    The scale is constant: an optimizer without variables bakes its initial scale into
    the first trace. Batches of that shape reuse the trace, parts of batches do not.
    """
    generator = np.random.default_rng(3)
    x = generator.integers(0, 12, size=(50, 5))
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, 0] % 2)).batch(9).cache()
    model = Words()
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01), initial_scale=64.0, dynamic_growth_steps=100
    )
    loss_of = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
            scaled = optimizer.scale_loss(loss)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(scaled, weights), weights)

    for batch in dataset.repeat(4):
        step(*batch)
    return {**results(model), "scale": np.array(float(optimizer.dynamic_scale.numpy()))}


def two_datasets(sizes, rows, joined, dropping=False):
    """Uses labelled and unlabelled rows in one step."""
    x, y = data(rows[0])
    others = data(rows[1])[0][::-1].copy()
    labelled = tf.data.Dataset.from_tensor_slices((x, y)).batch(sizes[0])
    unlabelled = tf.data.Dataset.from_tensor_slices(others).batch(sizes[1])
    model = classifier()
    optimizer = keras.optimizers.SGD(0.5)

    @tf.function
    def step(x, y, others):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(y, model(x))
            ) + tf.reduce_mean(model(others)[:, 0] ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    for _ in range(3):
        for (x, y), others in joined(labelled, unlabelled):
            step(x, y, others)
    return results(model)


def case_two_datasets_divided_alike():
    return two_datasets((12, 24), (72, 144), zip)


def case_two_datasets_of_other_batches():
    """Neither full batches nor last batches are multiples of each other's size."""
    return two_datasets((7, 24), (45, 164), zip)


def case_two_datasets_one_of_which_goes_on():
    def joined(labelled, unlabelled):
        following = iter(unlabelled.repeat())
        for batch in labelled:
            yield batch, next(following)

    return two_datasets((12, 10), (66, 64), joined)


def case_two_datasets_in_one_of_tensorflow():
    def joined(labelled, unlabelled):
        return tf.data.Dataset.zip((labelled, unlabelled))

    return two_datasets((12, 20), (60, 100), joined)


def loop_with_draws(draw, compile_step):
    """A loop whose loss uses what ``draw`` returns: random numbers by name.

    Their first dimension is that of the rows, but for names that begin with "common".
    The last batch has two rows, so that some ranks have none of them.
    """
    tf.random.set_seed(5)
    x, _ = data(26)
    dataset = tf.data.Dataset.from_tensor_slices(x).batch(8)
    model = classifier()
    optimizer = keras.optimizers.SGD(0.05)

    def drawing_step(x):
        drawn = draw(x)
        with tf.GradientTape() as tape:
            outputs, loss = model(x)[:, 0], 0.0
            for place, (name, numbers) in enumerate(drawn.items()):
                rows = 1 if name.startswith("common") else tf.shape(x)[0]
                numbers = tf.reshape(tf.cast(numbers, tf.float32), [rows, -1])
                places = tf.range(1, tf.shape(numbers)[1] + 1)
                factors = tf.cast(places, tf.float32) / (10.0 + place)
                loss += tf.reduce_mean(tf.reduce_sum(numbers * factors, 1) * outputs)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    step = tf.function(drawing_step) if compile_step else drawing_step
    for _ in range(2):
        for rows in dataset:
            step(rows)
    return results(model)


def case_tape_that_draws_with_a_state():
    def draw(x):
        rows, rates = tf.shape(x)[0], 1 + tf.abs(x)
        by_rates = tf.random.gamma((3,), rates)
        return {
            "gamma": tf.random.gamma((rows, 2), 2.0),
            "gamma_by_rates": tf.transpose(by_rates, [1, 0, 2]),
            "poisson": tf.random.poisson([], rates),
            "categorical": tf.random.categorical(x, 2),
            "normal": tf.random.normal((rows, 2)),
            "of_fixed_size": tf.random.normal((x.shape[0],)),
            "uniform": tf.random.uniform((2 * rows, 3), dtype=tf.float64),
            "integers": tf.random.uniform((rows, 3), 0, 9, tf.int32),
            "truncated": tf.random.truncated_normal((rows,)),
            "dropout": tf.nn.dropout(x, 0.5),
            "common": tf.random.normal((7,)),
            "common_number": tf.random.uniform(()),
            "common_integer": tf.random.uniform((), 0, 9, tf.int32),
            "common_choice": tf.random.categorical([[0.0, 1.0]], 1),
        }

    return loop_with_draws(draw, compile_step=True)


def case_tape_that_calls_functions():
    """A function within a function within the step draws numbers, twice the same."""
    model = classifier()
    optimizer = keras.optimizers.Adam(0.01)

    @tf.function
    def moved(x):
        scale = tf.random.uniform((tf.shape(x)[0], 1), 0.5, 1.5)
        return x * tf.cast(scale, x.dtype) + 0.2 * tf.random.normal(tf.shape(x))

    @tf.function
    def inner(x, y):
        with tf.GradientTape() as tape:
            x = tf.random.uniform(()) * moved(x) + moved(x) / 2
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x))
            loss = tf.reduce_mean(losses)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    @tf.function
    def step(x, y):
        return inner(x, y)

    tf.random.set_seed(5)
    dataset = tf.data.Dataset.from_tensor_slices(data()).batch(10)
    for _ in range(3):
        for x, y in dataset:
            step(x, y)
    return results(model)


def loop_with_a_fixed_number_of_draws(compile_step):
    """It draws 12 columns for each batch, and two numbers for each row."""
    tf.random.set_seed(5)
    model = classifier()
    optimizer = keras.optimizers.Adam(0.01)

    def drawing_step(x, y):
        columns = tf.random.uniform([12], 0, 6, tf.int32)
        kept = tf.reduce_sum(tf.one_hot(columns, 6), 0)
        factors = tf.reshape(tf.random.uniform([2 * x.shape[0]]), [-1, 2])
        with tf.GradientTape() as tape:
            found = model(x * kept + tf.reduce_sum(factors, 1, keepdims=True))
            losses = keras.losses.sparse_categorical_crossentropy(y, found)
            loss = tf.reduce_mean(losses)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    step = tf.function(drawing_step) if compile_step else drawing_step
    dataset = tf.data.Dataset.from_tensor_slices(data()).batch(12)
    for _ in range(2):
        for x, y in dataset:
            step(x, y)
    return results(model)


def case_tape_that_draws_a_fixed_number():
    return loop_with_a_fixed_number_of_draws(compile_step=True)


def case_tape_that_draws_a_fixed_number_eagerly():
    return loop_with_a_fixed_number_of_draws(compile_step=False)


def case_tape_that_draws_for_batches_of_two_sizes():
    """Half of a larger batch has as many rows as a smaller batch."""
    tf.random.set_seed(5)
    model = classifier()
    optimizer = keras.optimizers.SGD(0.05)
    x, y = data(48)
    for size in (8, 16):
        for rows, labels in tf.data.Dataset.from_tensor_slices((x, y)).batch(size):
            scale = tf.random.uniform([rows.shape[0]], 0.5, 1.5)[:, None]
            with tf.GradientTape() as tape:
                found = model(rows * scale)
                losses = keras.losses.sparse_categorical_crossentropy(labels, found)
                loss = tf.reduce_mean(losses)
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
    return results(model)


def case_tape_that_draws_from_any_distribution():
    generator = tf.random.Generator.from_seed(7)

    def draw(x):
        rows, rates = tf.shape(x)[0], 1 + tf.abs(x)
        probabilities = tf.sigmoid(x)
        return {
            "generator": generator.normal((rows, 3)),
            "generator_again": generator.uniform((2 * rows,)),
            "gamma": keras.random.gamma((rows, 2), 2.0, seed=1),
            "beta": keras.random.beta((rows, 6), rates, 2.0, seed=2),
            "binomial": keras.random.binomial((rows, 6), 5.0, probabilities, seed=3),
            "categorical": keras.random.categorical(x, 2, seed=4),
            "poisson": tf.random.stateless_poisson((rows, 6), [1, 2], rates),
            "common": keras.random.shuffle(tf.range(9), seed=6),
        }

    return loop_with_draws(draw, compile_step=True)


def case_tape_that_draws_eagerly():
    def draw(x):
        rows, rates = tf.shape(x)[0], 1 + tf.abs(x)
        by_rates = tf.random.gamma((3,), rates)
        return {
            "normal": tf.random.normal((rows, 2)),
            "dropout": tf.nn.dropout(x, 0.5),
            "gamma": tf.random.gamma((rows, 2), 2.0),
            "gamma_by_rates": tf.transpose(by_rates, [1, 0, 2]),
            "poisson": tf.random.poisson([], rates),
            "categorical": tf.random.categorical(x, 2),
            "common": tf.random.shuffle(tf.range(9)),
        }

    return loop_with_draws(draw, compile_step=False)


def case_tape_that_samples_classes():
    """The samplers have other settings, and some of them the same seeds."""
    tf.random.set_seed(5)
    x, _ = data(45)
    words = np.random.default_rng(6).integers(0, 20, (45, 2))
    dataset = tf.data.Dataset.from_tensor_slices((x, words)).batch(8)
    weights, biases = tf.Variable(tf.zeros([20, 6])), tf.Variable(tf.zeros([20]))
    variables = [weights, biases]
    for variable in variables:
        variable.assign(tf.random.stateless_normal(variable.shape, (1, 2)))
    optimizer = keras.optimizers.SGD(0.2)

    def samples(words):
        fixed = tf.random.fixed_unigram_candidate_sampler
        return [
            tf.random.uniform_candidate_sampler(words, 2, 5, True, 20, seed=3),
            tf.random.uniform_candidate_sampler(words, 2, 5, False, 20, seed=3),
            fixed(words, 2, 5, True, 20, unigrams=list(range(1, 21))),
            None,  # Log-uniform, within the loss.
        ]

    @tf.function
    def step(x, words):
        x = tf.cast(x, tf.float32)
        with tf.GradientTape() as tape:
            loss = 0.0
            for sampled in samples(words):
                for loss_of in (tf.nn.nce_loss, tf.nn.sampled_softmax_loss):
                    losses = loss_of(
                        weights, biases, words, x, 5, 20, 2, sampled_values=sampled
                    )
                    loss += tf.reduce_mean(losses) / 10
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    for _ in range(3):
        for batch in dataset:
            step(*batch)
    return {"weights": weights.numpy(), "biases": biases.numpy()}


def case_gan_with_noise_of_a_fixed_size():
    """As in TensorFlow's tutorial, with dropout in the critic."""
    tf.random.set_seed(5)
    x, _ = data(64)
    generator, critic = (
        keras.Sequential([keras.Input((size,)), *layers])
        for size, layers in [
            (4, [keras.layers.Dense(6)]),
            (6, [keras.layers.Dropout(0.3, seed=2), keras.layers.Dense(1)]),
        ]
    )
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    optimizers = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)

    @tf.function
    def step(images):
        noise = tf.random.normal([16, 4])
        with tf.GradientTape(persistent=True) as tape:
            made = generator(noise, training=True)
            real, fake = critic(images, training=True), critic(made, training=True)
            losses = (
                loss(tf.ones_like(fake), fake),
                loss(tf.ones_like(real), real) + loss(tf.zeros_like(fake), fake),
            )
        for model, value, optimizer in zip(
            (generator, critic), losses, optimizers, strict=True
        ):
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(value, weights), weights)

    for _ in range(2):
        for images in tf.data.Dataset.from_tensor_slices(x).batch(16):
            step(images)
    return {**results(generator), "critic": critic.get_weights()[0]}


def case_metrics_of_a_later_trace():
    """A metric is first updated when the step is traced for the second time."""

    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.value = self.add_weight(shape=(), initializer="zeros", name="value")

        def update_state(self, values):
            self.value.assign(tf.maximum(self.value, tf.reduce_max(values)))

        def result(self):
            return self.value

    x, y = data(32)
    model, optimizer = classifier(), keras.optimizers.SGD(0.1)
    metrics = Largest(), keras.metrics.Mean()

    @tf.function
    def step(x, y, counts):
        with tf.GradientTape() as tape:
            outputs = model(x)
            losses = keras.losses.sparse_categorical_crossentropy(y, outputs)
            loss = tf.reduce_mean(losses)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        if counts:
            for metric in metrics:
                metric.update_state(outputs[:, 0])

    for epoch in range(2):
        for batch in tf.data.Dataset.from_tensor_slices((x, y)).batch(8):
            step(*batch, epoch == 1)
    found = {type(metric).__name__: metric.result().numpy() for metric in metrics}
    return {**results(model), **found}


def case_several_batches_in_a_step():
    """Two batches for the critic, one for the generator; the last batch is smaller."""
    x, _ = data(70)
    critic, generator = classifier(), classifier()
    optimizers = keras.optimizers.SGD(0.2), keras.optimizers.SGD(0.2)

    @tf.function
    def step(x, trained, number):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(critic(x)[:, 0] * generator(x)[:, 1])
        weights = (critic, generator)[number].trainable_variables
        clipped, _ = tf.clip_by_global_norm(tape.gradient(loss, weights), 0.1)
        optimizers[number].apply(clipped, weights)

    steps = step, tf.function(step.python_function)
    for _ in range(2):
        batches = iter(tf.data.Dataset.from_tensor_slices(x).batch(8))
        for _ in range(3):
            for _ in range(2):
                steps[0](next(batches), critic, 0)
            steps[1](next(batches), generator, 1)
    return {**results(critic), "other": generator.get_weights()[0]}


def taking_batches(steps_of):
    """Twelve steps with batches that a ``tf.function`` takes, four in each call of it.

    ``steps_of`` makes it from the step.
    """
    x, y = data(46)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(46, seed=3).repeat()
    model = classifier(keras.layers.Dropout(0.3))
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)
    loss_mean = keras.metrics.Mean()
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    def step(x, y):
        with tf.GradientTape() as tape:
            probabilities = model(x, training=True)
            loss = tf.reduce_mean(
                keras.losses.sparse_categorical_crossentropy(y, probabilities)
            )
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        loss_mean.update_state(loss)
        accuracy.update_state(y, probabilities)

    steps, iterator = steps_of(step), iter(dataset.batch(9))
    found = []
    for _ in range(3):
        steps(iterator)
        found += [float(metric.result()) for metric in (loss_mean, accuracy)]
        loss_mean.reset_state()
        accuracy.reset_state()
    return {**results(model), "metrics": np.array(found)}


def case_tape_takes_batches():
    def steps_of(step):
        @tf.function
        def steps(iterator):
            for _ in tf.range(4):
                step(*next(iterator))

        return steps

    return taking_batches(steps_of)


def case_tape_takes_batches_one_by_one():
    def steps_of(step):
        @tf.function
        def steps(iterator):
            for _ in range(4):
                step(*iterator.get_next())

        return steps

    return taking_batches(steps_of)


def case_tape_takes_batches_in_another_function():
    def steps_of(step):
        take = tf.function(lambda iterator: iterator.get_next())
        train = tf.function(step)

        @tf.function
        def steps(iterator):
            for _ in tf.range(4):
                train(*take(iterator))

        return steps

    return taking_batches(steps_of)


def case_tape_takes_batches_until_it_has_four():
    def steps_of(step):
        @tf.function
        def steps(iterator):
            taken = tf.constant(0)
            for batch in iterator:
                step(*batch)
                taken = tf.add(taken, 1)
                if taken == 4:
                    break

        return steps

    return taking_batches(steps_of)


def case_tape_on_ragged_rows():
    """A mean over rows that are ragged."""
    lengths = [1 + each % 4 for each in range(40)]
    values = np.random.default_rng(1).normal(size=sum(lengths)).astype("float32")
    rows = tf.RaggedTensor.from_row_lengths(values, lengths)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.05)

    @tf.function(reduce_retracing=True)
    def step(rows):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(rows.to_tensor(shape=[None, 4])) - 1))
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    for _ in range(2):
        for batch in tf.data.Dataset.from_tensor_slices(rows).batch(8):
            step(batch)
    return results(model)


def case_session_of_tensorflow_1():
    """Every rank trains with all data, and draws what one process draws."""
    v1 = tf.compat.v1
    x, y = data(40)
    with tf.Graph().as_default():
        v1.set_random_seed(3)
        start = v1.glorot_uniform_initializer(seed=1)
        w = v1.get_variable("w", [6, 1], initializer=start)
        noisy = tf.constant(x) + 0.1 * tf.random.normal([40, 6])
        error = tf.square(noisy @ w - y.astype("float32")[:, None])
        train = v1.train.MomentumOptimizer(0.01, 0.9).minimize(tf.reduce_mean(error))
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for _ in range(50):
                session.run(train)
            return {"w0": session.run(w)}


def case_two_optimizers_compiled_by_xla():
    return with_two_optimizers(jit_compile=True)


if __name__ == "__main__":
    main(globals())
