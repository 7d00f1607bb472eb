"""Batches that a function takes within a loop are divided, and nothing differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.runtime.partition.installed import simulated_ranks

Train = Callable[[int], list[Any]]


def data(rows: int) -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 6)).astype("float32")
    return x, generator.normal(size=(rows, 2)).astype("float32")


def model() -> Any:
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.2)]
    return keras.Sequential([*layers, keras.layers.Dense(2)])


def steps_per_execution(rows: int) -> list[Any]:
    trained = model()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    trained.compile(optimizer, "mse", steps_per_execution=3, jit_compile=False)
    history = trained.fit(*data(rows), batch_size=16, epochs=3, verbose=0)
    return [*trained.get_weights(), history.history["loss"]]


def loop_in_a_function(rows: int) -> list[Any]:
    trained = model()
    trained.build((None, 6))
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(trained.trainable_variables)
    dataset = tf.data.Dataset.from_tensor_slices(data(rows)).batch(16)
    batches = iter(dataset.repeat())

    @tf.function  # type: ignore[untyped-decorator]
    def steps(batches: Any, count: Any) -> Any:
        total = 0.0
        for _ in tf.range(count):
            x, y = next(batches)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((trained(x, training=True) - y) ** 2)
            variables = trained.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            total += loss
        return total

    totals = [float(steps(batches, tf.constant(4))) for _ in range(4)]
    return [*trained.get_weights(), totals]


def draws_in_a_loop(rows: int) -> list[Any]:
    """Draws from a state, also in the first call, which does not know the size."""
    batches = iter(tf.data.Dataset.from_tensor_slices(data(rows)).batch(16).repeat())
    scale = tf.Variable(1.0)

    @tf.function  # type: ignore[untyped-decorator]
    def steps(batches: Any) -> Any:
        total = 0.0
        for _ in tf.range(2):
            x, _ = next(batches)
            with tf.GradientTape() as tape:
                noisy = scale * x + tf.random.normal(tf.shape(x))
                loss = tf.reduce_mean(noisy**2)
            scale.assign_sub(0.1 * tape.gradient(loss, scale))
            total += loss
        return total

    return [[float(steps(batches)) for _ in range(4)], scale.numpy()]


def loop_over_a_dataset(rows: int) -> list[Any]:
    """Losses, and weights: the loop ends early in every second epoch."""
    trained = model()
    trained.build((None, 6))
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(trained.trainable_variables)
    dataset = tf.data.Dataset.from_tensor_slices(data(rows)).batch(16)

    @tf.function  # type: ignore[untyped-decorator]
    def epoch(dataset: Any, most: Any) -> Any:
        total = tf.constant(0.0)
        for i, (x, y) in enumerate(dataset):
            if i == most:
                break
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((trained(x, training=True) - y) ** 2)
            variables = trained.trainable_variables
            gradients = tape.gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            total += loss
        return total

    mosts = [tf.constant(most, tf.int64) for most in (100, 3, 100, 2)]
    return [*trained.get_weights(), [float(epoch(dataset, most)) for most in mosts]]


def reduced_dataset(rows: int) -> list[Any]:
    weights = tf.Variable(np.ones(6, np.float32))
    dataset = tf.data.Dataset.from_tensor_slices(data(rows)).batch(16)

    @tf.function  # type: ignore[untyped-decorator]
    def train(dataset: Any) -> Any:
        def step(state: Any, x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                error = tf.linalg.matvec(x, weights) - y[:, 0]
                loss = tf.reduce_mean(error**2)
            weights.assign_sub(0.1 * tape.gradient(loss, weights))
            return state[0] + loss, tf.maximum(state[1], tf.reduce_max(error))

        state = tf.constant(0.0), tf.constant(-1e9)
        return dataset.reduce(state, lambda state, batch: step(state, *batch))

    losses = [[float(each) for each in train(dataset)] for _ in range(3)]
    return [weights.numpy(), losses]


LOOPS = (
    steps_per_execution,
    loop_in_a_function,
    draws_in_a_loop,
    loop_over_a_dataset,
    reduced_dataset,
)


def trained_by(train: Train, rows: int) -> list[Any]:
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    return train(rows)


@pytest.mark.parametrize(
    ("rows", "size"), [(96, 3), (100, 2)], ids=["fixed", "varying"]
)
@pytest.mark.parametrize("train", LOOPS)
def test_batches_of_a_loop_are_divided(train: Train, rows: int, size: int) -> None:
    whole = trained_by(train, rows)
    with simulated_ranks(size, strict=True) as hook:
        found = trained_by(train, rows)
    assert any(each.is_divided and each.trains for each in hook.programs)
    for one, other in zip(whole, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-6)


def test_draws_of_a_loop_over_a_dataset_begin_anew_with_each_loop() -> None:
    @tf.function  # type: ignore[untyped-decorator]
    def drawn(dataset: Any) -> Any:
        total = tf.zeros(2)
        for batch in dataset:
            total += tf.reduce_sum(
                batch + tf.random.uniform(tf.shape(batch), seed=3), 0
            )
        return total

    def totals() -> list[Any]:
        dataset = tf.data.Dataset.from_tensor_slices(np.ones((12, 2), np.float32))
        return [drawn(dataset.batch(4)).numpy() for _ in range(2)]

    expected = totals()
    with simulated_ranks(2):
        found = totals()
    np.testing.assert_array_equal(expected[0], expected[1])
    np.testing.assert_array_equal(found, expected)
