# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Gradients that the program changes before it passes them to the optimizer."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from tests.runtime.programs.cases.tools import classifier, data, main, results

ROWS = 46
"""In batches of 8; the last batch has 6 rows."""


def crossentropy(y, predicted):
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, predicted))


def batches(rows=ROWS, size=8):
    return tf.data.Dataset.from_tensor_slices(data(rows)).batch(size)


def gradients_of(model, x, y):
    with tf.GradientTape() as tape:
        loss = crossentropy(y, model(x, training=True))
    return tape.gradient(loss, model.trainable_variables)


def by_global_norm(gradients, _):
    return tf.clip_by_global_norm(gradients, 0.1)[0]


def adaptively(gradients, weights):
    """Clip each gradient in proportion to the norm of its weight."""
    return [
        gradient
        * tf.minimum(1.0, 0.05 * (tf.norm(weight) + 1e-3) / (tf.norm(gradient) + 1e-6))
        for gradient, weight in zip(gradients, weights, strict=True)
    ]


def looped(change, function, optimizer=None, rows=ROWS):
    model = classifier()
    optimizer = optimizer or keras.optimizers.SGD(0.5, momentum=0.9)

    @function
    def step(x, y):
        weights = model.trainable_variables
        gradients = change(gradients_of(model, x, y), weights)
        optimizer.apply_gradients(zip(gradients, weights, strict=True))

    for _ in range(2):
        for batch in batches(rows):
            step(*batch)
    return results(model)


def case_clipped_by_global_norm_eagerly():
    return looped(by_global_norm, lambda step: step)


def case_clipped_by_global_norm_in_a_graph():
    return looped(by_global_norm, tf.function)


def case_clipped_by_value():
    def by_value(gradients, _):
        return [tf.clip_by_value(gradient, -0.01, 0.01) for gradient in gradients]

    return looped(by_value, tf.function)


def case_clipped_where_too_large():
    """Python code decides in each step whether to clip."""

    def sometimes(gradients, _):
        norm = float(tf.linalg.global_norm(gradients))
        return [g * 0.3 / norm for g in gradients] if norm > 0.3 else gradients

    return looped(sometimes, lambda step: step)


def case_clipped_later():
    """Clips from the fifth step on."""
    steps = []

    def later(gradients, _):
        steps.append(0)
        return by_global_norm(gradients, _) if len(steps) > 4 else gradients

    return looped(later, lambda step: step)


def case_with_decay_and_centred():
    def changed(gradients, weights):
        return [
            gradient - tf.reduce_mean(gradient, 0, keepdims=True) + 0.01 * weight
            for gradient, weight in zip(gradients, weights, strict=True)
        ]

    return looped(changed, tf.function)


def case_with_noise():
    generator = tf.random.Generator.from_seed(3)

    def noisy(gradients, _):
        return [
            tf.clip_by_norm(gradient, 0.1) + generator.normal(gradient.shape, 0.0, 0.01)
            for gradient in gradients
        ]

    return looped(noisy, tf.function)


def case_computed_in_one_function_and_applied_in_another():
    model = classifier()
    optimizer = keras.optimizers.SGD(0.5)

    @tf.function
    def compute(x, y):
        return gradients_of(model, x, y)

    for _ in range(2):
        for x, y in batches():
            gradients, _ = tf.clip_by_global_norm(compute(x, y), 0.1)
            optimizer.apply(gradients, model.trainable_variables)
    return results(model)


def case_sharpness_aware():
    """Two passes: the second uses weights that the first gradient has moved."""
    model = classifier()
    optimizer = keras.optimizers.SGD(0.5)

    @tf.function
    def step(x, y):
        weights = model.trainable_variables
        first = gradients_of(model, x, y)
        norm = tf.linalg.global_norm(first)
        moves = [0.5 * gradient / (norm + 1e-12) for gradient in first]
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_add(move)
        second = gradients_of(model, x, y)
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_sub(move)
        optimizer.apply(second, weights)

    for _ in range(2):
        for batch in batches():
            step(*batch)
    return results(model)


def case_added_up_over_uneven_batches():
    """The last applied gradient of an epoch is from batches of 8 and of 6 rows."""
    model = classifier()
    optimizer = keras.optimizers.SGD(0.5)
    weights = model.trainable_variables
    for _ in range(2):
        sums: list[tf.Tensor] = []
        for number, (x, y) in enumerate(batches()):
            gradients = gradients_of(model, x, y)
            sums = (
                [a + b for a, b in zip(sums, gradients, strict=True)]
                if sums
                else gradients
            )
            if number % 2:
                optimizer.apply([total / 2 for total in sums], weights)
                sums = []
    return results(model)


def case_of_dictionaries_embeddings_and_nothing():
    """Sparse and missing gradients, sources in a dictionary, and a persistent tape."""
    words = np.random.default_rng(0).integers(0, 20, (ROWS, 3))
    labels = words[:, 0] % 2
    embedding = keras.layers.Embedding(20, 4)
    dense = keras.layers.Dense(2, "softmax")
    unused = keras.layers.Dense(1)
    for layer, shape in ((embedding, (None, 3)), (dense, (None, 4)), (unused, (1, 1))):
        layer.build(shape)
    optimizer = keras.optimizers.Adam(0.01)
    layers = {"embedding": embedding, "dense": dense, "unused": unused}
    weights = {name: layer.trainable_variables for name, layer in layers.items()}

    @tf.function
    def step(words, labels):
        with tf.GradientTape(persistent=True) as tape:
            hidden = tf.reduce_mean(embedding(words), 1)
            loss = crossentropy(labels, dense(hidden))
        gradients = tape.gradient(loss, weights)
        zeros = tape.gradient(
            loss,
            [weight.value for weight in unused.trainable_variables],
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        kernel = tape.gradient(loss, dense.kernel)
        flat = tf.nest.flatten(gradients)
        clipped, _ = tf.clip_by_global_norm([*flat, *zeros, kernel], 0.2)
        optimizer.apply(clipped[: len(flat)], tf.nest.flatten(weights))

    dataset = tf.data.Dataset.from_tensor_slices((words, labels)).batch(8)
    for _ in range(2):
        for batch in dataset:
            step(*batch)
    return {
        "table": embedding.get_weights()[0],
        "kernel": dense.get_weights()[0],
    }


class Changing(keras.Sequential):
    """A custom training step that changes its gradients."""

    def __init__(self, change, layers):
        super().__init__(layers)
        self.change = change

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = crossentropy(y, self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        weights = self.trainable_variables
        gradients = self.change(tape.gradient(scaled, weights), weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


def stepped(change, optimizer=None, model=Changing, **kwargs):
    x, y = data(ROWS)
    model = model(change, classifier().layers)
    model.compile(optimizer or keras.optimizers.SGD(0.5), **kwargs)
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return results(model)


def case_step_that_clips():
    return stepped(by_global_norm)


def case_step_that_clips_adaptively_and_eagerly():
    return stepped(adaptively, run_eagerly=True)


def case_step_that_clips_scaled_losses():
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.5), initial_scale=4.0
    )
    return stepped(by_global_norm, optimizer)


def case_step_with_keras_noise():
    """Keras's generators differ between ranks; all ranks use the chief's numbers."""
    seeds = keras.random.SeedGenerator(5)

    def noisy(gradients, _):
        clipped, _ = tf.clip_by_global_norm(gradients, 0.1)
        return [
            gradient + keras.random.normal(gradient.shape, 0.0, 0.01, seed=seeds)
            for gradient in clipped
        ]

    return stepped(noisy)


def case_optimizer_that_centres_and_clips():
    """In Keras's own step; an optimizer's subclass clips in ``apply_gradients``."""

    class Clipping(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars):
            gradients, variables = zip(*grads_and_vars, strict=True)
            clipped, _ = tf.clip_by_global_norm(gradients, 0.1)
            return super().apply_gradients(zip(clipped, variables, strict=True))

    x, y = data(ROWS)
    model = classifier()
    model.compile(Clipping(0.5), "sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return results(model)


class Accumulating(keras.Sequential):
    """Applies the mean of two gradients inside ``tf.cond``."""

    def __init__(self, layers):
        super().__init__(layers)
        self.steps = tf.Variable(0, trainable=False)
        self.sums = [
            tf.Variable(tf.zeros(weight.shape), trainable=False)
            for weight in self.trainable_variables
        ]

    def train_step(self, data):
        x, y = data
        self.steps.assign_add(1)
        with tf.GradientTape() as tape:
            loss = crossentropy(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient / 2.0)
        tf.cond(self.steps % 2 == 0, self.apply_sums, lambda: None)
        return {"loss": loss}

    def apply_sums(self):
        totals = [tf.identity(total) for total in self.sums]
        self.optimizer.apply(totals, self.trainable_variables)
        for total in self.sums:
            total.assign(tf.zeros_like(total))


def case_applied_in_a_conditional():
    x, y = data(ROWS)
    model = Accumulating(classifier().layers)
    model.compile(keras.optimizers.SGD(0.5))
    model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    return results(model)


def case_penalty_of_gradients():
    """A penalty on the gradient by the inputs, which an outer tape differentiates."""
    model = classifier()
    optimizer = keras.optimizers.SGD(0.2)

    @tf.function
    def step(x, y):
        weights = model.trainable_variables
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                predicted = model(x)[:, 0]
            slopes = inner.gradient(predicted, x)
            penalty = tf.reduce_mean((tf.norm(slopes, axis=1) - 1.0) ** 2)
            loss = crossentropy(y, model(x)) + penalty
        clipped, _ = tf.clip_by_global_norm(outer.gradient(loss, weights), 0.1)
        optimizer.apply(clipped, weights)

    for _ in range(2):
        for batch in batches():
            step(*batch)
    return results(model)


class Adversarial(keras.Model):
    """Trains on rows that are moved along gradients of four kinds of losses."""

    def __init__(self):
        super().__init__()
        self.inner = classifier()
        self.of_sums = keras.losses.SparseCategoricalCrossentropy(reduction="sum")

    def call(self, x):
        return self.inner(x)

    def slope(self, x, loss_of):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_of(x)
        return tape.gradient(loss, x)

    def train_step(self, batch):
        x, y = batch
        moved = (
            x
            + 4.0 * self.slope(x, lambda z: self.compute_loss(z, y, self(z)))
            + 0.1 * self.slope(x, lambda z: self.of_sums(y, self(z)))
            + 3.0 * self.slope(x, lambda z: crossentropy(y, self(z)))
            + 0.2 * self.slope(x, lambda z: tf.reduce_sum(self(z)[:, 0]))
            + 0.3 * self.slope(x, lambda z: self(z)[:, 1])
        )
        moved = tf.stop_gradient(moved)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(moved, y, self(moved, training=True))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def case_of_inputs():
    """The last batch has six rows."""
    model = Adversarial()
    model(data(2)[0])
    model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy")
    model.fit(*data(ROWS), batch_size=8, epochs=2, shuffle=False, verbose=0)
    return results(model)


def looped_over_inputs(function, loss_of):
    model = classifier()
    optimizer = keras.optimizers.SGD(0.5)

    @function
    def step(x, y):
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = loss_of(y, model(x))
        moved = x + 5.0 * inner.gradient(loss, x)
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(moved))
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)

    for _ in range(2):
        for batch in batches():
            step(*batch)
    return results(model)


def case_of_inputs_in_a_loop():
    return looped_over_inputs(tf.function, crossentropy)


def case_of_inputs_eagerly():
    loss = keras.losses.SparseCategoricalCrossentropy()
    return looped_over_inputs(lambda step: step, loss)


def case_clipped_by_rows():
    """Clips the gradient of each row and takes the mean, without a batch gradient."""
    model = classifier()
    optimizer = keras.optimizers.SGD(0.5)

    @tf.function
    def step(x, y):
        weights = model.trainable_variables
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x))
        rows = tape.jacobian(losses, weights)
        changed = [
            tf.reduce_mean(tf.clip_by_value(gradients, -0.05, 0.05), 0)
            for gradients in rows
        ]
        optimizer.apply(changed, weights)

    for _ in range(2):
        for batch in batches(24):
            step(*batch)
    return results(model)


if __name__ == "__main__":
    main(globals())
