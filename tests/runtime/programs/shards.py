# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Trainings with ``runtime.shards``: RESULTS [CASE...], as in ``cases/tools.py``."""

from __future__ import annotations

import random

import keras
import numpy as np
import tensorflow as tf

from tests.runtime.programs.cases.tools import (
    classifier,
    compiled,
    data,
    main,
    results,
)


def state_of(model):
    """All variables, with those of the optimizer and of seed generators."""
    variables = [*model.variables, *model.optimizer.variables]
    found = {f"v{i}": v.numpy() for i, v in enumerate(variables)}
    return {key: value for key, value in found.items() if value.dtype != np.bool_}


def case_fit():
    """The last batch has five rows, fewer than there are shards."""
    rng = np.random.default_rng(0)
    rows = 148
    numbers = rng.normal(size=(rows, 20)).astype("float32")
    words = rng.integers(0, 50, (rows, 6))
    labels = rng.integers(0, 5, rows)
    first, second = keras.Input((20,)), keras.Input((6,), dtype="int32")
    hidden = keras.layers.Dense(32, activation="relu")(first)
    hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Dropout(0.3)(hidden)
    embedded = keras.layers.Embedding(50, 8)(second)
    joined = keras.layers.Concatenate()([hidden, keras.layers.Flatten()(embedded)])
    outputs = keras.layers.Dense(5, activation="softmax")(joined)
    model = compiled(keras.Model([first, second], outputs), keras.optimizers.Adam(0.01))
    history = model.fit(
        [numbers, words], labels, batch_size=32, epochs=2, validation_split=0.1
    )
    return {**state_of(model), **results(model, history)}


def case_tiny():
    """Few rows, and a matrix that is large for so few."""
    wide = [keras.layers.Dense(512, activation="tanh") for _ in range(2)]
    model = compiled(classifier(*wide), keras.optimizers.SGD(0.1, momentum=0.9))
    model.fit(*data(40), batch_size=20, epochs=1, verbose=0)
    return results(model)


class OwnStep(keras.Model):
    """Logs a number that no metric keeps."""

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )
        return {"loss": loss}


def with_step(kind, optimizer=None):
    inner = classifier()
    return compiled(kind(inner.inputs, inner.outputs), optimizer, metrics=None)


def case_own_step():
    model = with_step(OwnStep, keras.optimizers.SGD(0.1, global_clipnorm=0.1))
    history = model.fit(*data(), batch_size=16, epochs=2)
    return {**state_of(model), **results(model, history)}


def case_eagerly():
    """Gradients that overflow are skipped, and the others accumulated."""
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1e38)
    model = compiled(classifier(keras.layers.Dropout(0.2)), optimizer)
    model.run_eagerly = True
    history = model.fit(*data(), batch_size=16, epochs=2)
    return {**state_of(model), **results(model, history)}


def own_loss(y_true, y_pred):
    y_true = tf.one_hot(tf.cast(tf.reshape(y_true, [-1]), tf.int32), 2)
    return tf.reduce_mean((y_true - y_pred) ** 2)


def case_own_loss():
    model = compiled(classifier(), loss=own_loss)
    history = model.fit(*data(), batch_size=16, epochs=2)
    return {**state_of(model), **results(model, history)}


# --- steps that do more than apply the gradients --------------------------------------


class Clips(OwnStep):
    def train_step(self, batch):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )
        return {"loss": loss}


def trained(model, **kwargs):
    """Trains a model on rows whose last batch is smaller than the others."""
    history = model.fit(*data(), batch_size=16, epochs=2, **kwargs)
    return {**state_of(model), **results(model, history)}


def case_clips():
    """The program clips the gradient of the whole batch."""
    return trained(with_step(Clips))


class Accumulates(OwnStep):
    """Adds gradients up, and applies them in every third step; counts its steps."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps = tf.Variable(0, trainable=False)
        self.slow = self.add_weight(shape=(6, 8), trainable=False, name="slow")
        self.sums = [
            tf.Variable(tf.zeros(v.shape), trainable=False)
            for v in self.trainable_variables
        ]

    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient / (1.0 + tf.norm(gradient)))
        self.steps.assign_add(1)
        tf.cond(self.steps % 3 == 0, self.apply, lambda: None)
        self.slow.assign(0.9 * self.slow + 0.1 * self.trainable_variables[0])
        return {"loss": loss}

    def apply(self):
        sums = [total.read_value() / 3.0 for total in self.sums]
        self.optimizer.apply(sums, self.trainable_variables)
        for total in self.sums:
            total.assign(tf.zeros_like(total))


def case_accumulates():
    model = with_step(Accumulates)
    found = trained(model)
    sums = {f"sum{i}": total.numpy() for i, total in enumerate(model.sums)}
    return {**found, **sums, "steps": model.steps.numpy()}


class Adversaries(keras.Model):
    """A GAN with a penalty of gradients and two optimizers; one critic has two steps.

    Its networks have dropout and batch normalization.
    """

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [
                keras.Input((4,)),
                # The gradient of a bias would be zero, but for rounding.
                keras.layers.Dense(8, use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.LeakyReLU(),
                keras.layers.Dense(6),
            ]
        )
        self.critic = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="tanh"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(1),
            ]
        )
        self.critic_loss = keras.metrics.Mean(name="critic_loss")
        self.seeds = keras.random.SeedGenerator(3)
        self.critic_optimizer = keras.optimizers.Adam(0.01)

    def noise(self, batch):
        return keras.random.normal((tf.shape(batch)[0], 4), seed=self.seeds)

    def train_step(self, batch):
        for _ in range(2):
            fake = self.generator(self.noise(batch), training=True)
            with tf.GradientTape() as tape:
                with tf.GradientTape() as inner:
                    mixed = 0.5 * (batch + fake)
                    inner.watch(mixed)
                    score = self.critic(mixed, training=True)
                slopes = inner.gradient(score, mixed)
                slopes = tf.sqrt(tf.reduce_sum(slopes**2, axis=1) + 1e-6)
                loss = tf.reduce_mean(
                    self.critic(fake, training=True)
                    - self.critic(batch, training=True)
                    + 10.0 * tf.reshape((slopes - 1.0) ** 2, (-1, 1))
                )
            weights = self.critic.trainable_variables
            gradients = tape.gradient(loss, weights)
            self.critic_optimizer.apply_gradients(zip(gradients, weights, strict=True))
            self.critic_loss.update_state(loss)
        with tf.GradientTape() as tape:
            fake = self.generator(self.noise(batch), training=True)
            loss = -tf.reduce_mean(self.critic(fake, training=True))
        weights = self.generator.trainable_variables
        gradients = tape.gradient(loss, weights)
        gradients = [tf.clip_by_norm(gradient, 1.0) for gradient in gradients]
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"critic_loss": self.critic_loss.result(), "loss": loss}


def case_adversaries():
    model = Adversaries()
    model.compile(keras.optimizers.Adam(0.01))
    history = model.fit(data()[0], batch_size=16, epochs=2)
    found = {**state_of(model), **results(model, history)}
    slots = model.critic_optimizer.variables
    return {**found, **{f"slot{i}": slot.numpy() for i, slot in enumerate(slots)}}


class Sharp(OwnStep):
    """The gradient at perturbed weights (SAM)."""

    def gradient(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        return loss, tape.gradient(loss, self.trainable_variables)

    def train_step(self, batch):
        loss, gradients = self.gradient(batch)
        scale = 0.05 / tf.linalg.global_norm(gradients)
        for weight, gradient in zip(self.trainable_variables, gradients, strict=True):
            weight.assign_add(gradient * scale)
        _, sharp = self.gradient(batch)
        for weight, gradient in zip(self.trainable_variables, gradients, strict=True):
            weight.assign_sub(gradient * scale)
        self.optimizer.apply(sharp, self.trainable_variables)
        return {"loss": loss}


def case_sharp():
    return trained(with_step(Sharp))


# --- loops ----------------------------------------------------------------------------


def batches(*arrays, size=16):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(size)


def case_loop():
    """The function clips, and returns all sorts of things; the last batch is small."""
    model = classifier(keras.layers.BatchNormalization(), keras.layers.Dropout(0.2))
    optimizer = keras.optimizers.Adam(0.02)
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    steps = tf.Variable(0, trainable=False)

    @tf.function
    def gradients_of(x, y):
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            loss = loss_of(y, predictions)
        return loss, predictions, tape.gradient(loss, model.trainable_variables)

    @tf.function
    def step(batch, rate=1.0):
        loss, predictions, gradients = gradients_of(*batch)
        gradients, norm = tf.clip_by_global_norm(gradients, 0.1 * rate)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        steps.assign_add(1)
        accuracy.update_state(batch[1], predictions)
        if steps % 2 == 0:
            steps.assign_add(10)
        return {"loss": loss, "norm": norm, "predictions": predictions}

    found, losses = [], []
    for _ in range(2):
        for x, y in batches(*data()):
            result = step((tf.cast(x, tf.float32) / 2.0, y), rate=0.5)
            found.append(result["predictions"].numpy())
            losses.append([float(result["loss"]), float(result["norm"])])
    optimizer_state = {f"o{i}": v.numpy() for i, v in enumerate(optimizer.variables)}
    return {
        **results(model),
        **optimizer_state,
        "predictions": np.concatenate(found),
        "losses": np.array(losses),
        "steps": steps.numpy(),
        "history_accuracy": np.array(float(accuracy.result())),
    }


def case_loop_of_adversaries():
    """A function for each network, with an optimizer of its own."""
    networks = Adversaries()
    critic, generator = networks.critic, networks.generator
    of_critic, of_generator = (keras.optimizers.RMSprop(0.01) for _ in range(2))

    @tf.function
    def train_critic(real):
        fake = generator(networks.noise(real), training=True)
        with tf.GradientTape() as tape:
            scores = critic(real, training=True), critic(fake, training=True)
            loss = tf.reduce_mean(tf.nn.relu(1.0 - scores[0]) + tf.nn.relu(scores[1]))
        gradients = tape.gradient(loss, critic.trainable_variables)
        of_critic.apply_gradients(
            zip(gradients, critic.trainable_variables, strict=True)
        )
        for weight in critic.trainable_variables:
            weight.assign(tf.clip_by_value(weight, -0.3, 0.3))
        return loss

    @tf.function
    def train_generator(real):
        with tf.GradientTape() as tape:
            fake = generator(networks.noise(real), training=True)
            loss = -tf.reduce_mean(critic(fake, training=True))
        gradients = tape.gradient(loss, generator.trainable_variables)
        of_generator.apply_gradients(
            zip(gradients, generator.trainable_variables, strict=True)
        )
        return loss

    losses = [
        [float(train_critic(real)), float(train_generator(real))]
        for _ in range(2)
        for real in batches(data()[0]).map(lambda x: x)
    ]
    weights = [*critic.variables, *generator.variables]
    found = {f"v{i}": each.numpy() for i, each in enumerate(weights)}
    return {**found, "losses": np.array(losses)}


def case_loop_with_noise():
    """A GAN: one function with two tapes; the loop draws the noise."""
    rng = np.random.default_rng(1)
    real = rng.normal(1.0, 0.3, size=(128, 12)).astype("float32")

    def network(inputs, outputs):
        return keras.Sequential(
            [
                keras.Input((inputs,)),
                keras.layers.Dense(16),
                keras.layers.LeakyReLU(),
                keras.layers.Dense(outputs),
            ]
        )

    generator, critic = network(8, 12), network(12, 1)
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True)
    of_generator, of_critic = (keras.optimizers.Adam(0.01) for _ in range(2))

    @tf.function
    def step(images, noise):
        with tf.GradientTape() as first, tf.GradientTape() as second:
            fake = generator(noise, training=True)
            scores, fakes = critic(images, training=True), critic(fake, training=True)
            loss = loss_of(tf.ones_like(fakes), fakes)
            other = loss_of(tf.ones_like(scores), scores)
            other += loss_of(tf.zeros_like(fakes), fakes)
        gradients = first.gradient(loss, generator.trainable_variables)
        others = second.gradient(other, critic.trainable_variables)
        of_generator.apply_gradients(
            zip(gradients, generator.trainable_variables, strict=True)
        )
        of_critic.apply_gradients(zip(others, critic.trainable_variables, strict=True))
        return loss, other

    losses = []
    for (images,) in batches(real, size=32).repeat(2):
        noise = tf.random.normal((images.shape[0], 8))
        losses.append([float(loss) for loss in step(images, noise)])
    weights = [*generator.variables, *critic.variables]
    found = {f"v{i}": each.numpy() for i, each in enumerate(weights)}
    return {**found, "losses": np.array(losses)}


def case_undivided_loop():
    """A tape in the loop itself: all ranks compute the whole batch."""
    model = classifier(keras.layers.Dropout(0.2))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    for x, y in batches(*data()):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
    return results(model)


def case_on_batch():
    model = with_step(Clips)
    x, y = data()
    for start in range(0, len(x), 16):
        model.train_on_batch(x[start : start + 16], y[start : start + 16])
    return state_of(model)


def case_attention():
    rng = np.random.default_rng(2)
    words, labels = rng.integers(0, 50, (50, 8)), rng.integers(0, 5, 50)
    inputs = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(50, 16)(inputs)
    seen = keras.layers.MultiHeadAttention(2, 8, use_bias=False, dropout=0.1)(x, x)
    x = keras.layers.LayerNormalization()(x + seen)
    outputs = keras.layers.Dense(5)(keras.layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, steps_per_execution=2)
    history = model.fit(words, labels, batch_size=16, epochs=2, verbose=0)
    return {**state_of(model), **results(model, history)}


def case_images():
    rng = np.random.default_rng(3)
    images = rng.normal(size=(40, 12, 12, 3)).astype("float32")
    labels = rng.integers(0, 3, 40)
    layers = [
        keras.Input((12, 12, 3)),
        keras.layers.RandomFlip(),
        keras.layers.Conv2D(8, 3, padding="same", use_bias=False),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.SeparableConv2D(8, 3),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(3, activation="softmax"),
    ]
    model = compiled(keras.Sequential(layers))
    history = model.fit(images, labels, batch_size=16, epochs=2, verbose=0)
    predictions = model.predict(images, verbose=0)
    return {**state_of(model), **results(model, history), "predictions": predictions}


def case_tape_around_a_function():
    model = classifier(keras.layers.Dropout(0.2))
    optimizer = keras.optimizers.SGD(0.1)
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    predict = tf.function(lambda x: model(x, training=True))
    for x, y in batches(*data()):
        with tf.GradientTape() as tape:
            loss = loss_of(y, predict(x))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
    return results(model)


# --- steps that need all rows of a batch ----------------------------------------------


class Scales(OwnStep):
    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        gradients = [gradient * loss for gradient in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def case_scaled_by_the_loss():
    return trained(with_step(Scales))


class Keeps(OwnStep):
    """Keeps the last loss, and the number of rows."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.last = tf.Variable(0.0, trainable=False)
        self.rows = tf.Variable(0.0, trainable=False)

    def train_step(self, batch):
        logs = super().train_step(batch)
        self.last.assign(logs["loss"])
        self.rows.assign_add(tf.cast(tf.shape(batch[0])[0], tf.float32))
        return logs


def case_kept_loss():
    model = with_step(Keeps)
    return {**trained(model), "last": model.last.numpy(), "rows": model.rows.numpy()}


class AppliesLater(OwnStep):
    def train_step(self, batch):
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)

        def apply():
            self.optimizer.apply(gradients, self.trainable_variables)

        tf.cond(loss > 0.5, apply, lambda: None)
        return {"loss": loss}


def case_applied_by_its_loss():
    return trained(with_step(AppliesLater))


class Draws(OwnStep):
    """Scales the loss by a random number of Python."""

    def compute_loss(self, *args, **kwargs):
        return super().compute_loss(*args, **kwargs) * (1.0 + random.random())


def case_step_that_draws():
    return trained(with_step(Draws))


class Shakes(keras.layers.Layer):
    def call(self, inputs):
        return inputs * float(np.random.uniform(0.9, 1.1))


def case_layer_that_draws():
    model = compiled(classifier(Shakes()))
    model.run_eagerly = True
    return trained(model)


def case_built_by_its_first_step():
    """Layers draw their seeds while they are built."""
    layers = [
        keras.layers.Dense(8, activation="tanh"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(2, activation="softmax"),
    ]
    return trained(compiled(keras.Sequential(layers)))


def looped(loss_of, result_of=lambda loss, predictions: loss):
    """A loop whose function uses this loss and returns that result."""
    model = classifier()
    optimizer = keras.optimizers.SGD(0.01)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            predictions = model(x, training=True)
            loss = loss_of(y, predictions)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return result_of(loss, predictions)

    returned = [step(x, y).numpy() for x, y in batches(*data(), size=25)]
    return {**results(model), "returned": np.array(returned)}


def case_loop_that_sums():
    return looped(sum_of_squares)


def case_loop_of_similarities():
    def loss_of(y, predictions):
        logits = tf.matmul(predictions, predictions, transpose_b=True)
        return tf.reduce_mean(tf.nn.log_softmax(10.0 * logits) ** 2)

    return looped(loss_of)


def case_loop_with_the_largest():
    return looped(own_loss, lambda loss, predictions: tf.reduce_max(predictions))


def case_loop_that_counts():
    def count(loss, predictions):
        return tf.math.count_nonzero(predictions[:, 0] > 0.5)

    return looped(own_loss, count)


def sum_of_squares(y_true, y_pred):
    y_true = tf.one_hot(tf.cast(tf.reshape(y_true, [-1]), tf.int32), 2)
    return tf.reduce_sum((y_true - y_pred) ** 2)


def case_loss_that_sums():
    optimizer = keras.optimizers.SGD(0.01)
    return trained(compiled(classifier(), optimizer, loss=sum_of_squares))


def spread(y_true, y_pred):
    return tf.math.reduce_std(y_pred[:, 0])


def case_loss_of_the_batch():
    return trained(compiled(classifier(), loss=spread))


def case_half_precision():
    """Products in bfloat16: their sums are not rounded one by one."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", dtype="mixed_bfloat16"),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    return trained(compiled(model))


def case_masked_loss():
    words = np.random.default_rng(0).integers(0, 9, (32, 5))
    model = compiled(
        keras.Sequential(
            [
                keras.Input((5,), dtype="int32"),
                keras.layers.Embedding(9, 4, mask_zero=True),
                keras.layers.Dense(2, activation="softmax"),
            ]
        )
    )
    history = model.fit(words, words % 2, batch_size=16, verbose=0)
    return {**state_of(model), **results(model, history)}


def case_stateful():
    model = keras.Sequential(
        [
            keras.Input(batch_shape=(16, 3, 2)),
            keras.layers.LSTM(4, stateful=True),
            keras.layers.Dense(2, activation="softmax"),
        ]
    )
    x, y = data(32)
    history = compiled(model).fit(x.reshape(32, 3, 2), y, batch_size=16, verbose=0)
    return {**state_of(model), **results(model, history)}


class Noise(keras.layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


def case_drawn_with_a_state():
    return trained(compiled(classifier(Noise())))


class Seen(keras.layers.Layer):
    def build(self, shape):
        self.seen = self.add_weight(shape=(), trainable=False, name="seen")

    def call(self, x):
        self.seen.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
        return x


def case_kept_by_a_layer():
    return trained(compiled(classifier(Seen())))


def case_synchronized():
    normalization = keras.layers.BatchNormalization(synchronized=True)
    return trained(compiled(classifier(normalization)))


if __name__ == "__main__":
    main(globals())
