"""Functions that XLA is to compile: divided without XLA, or whole with it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.runtime.partition.installed import simulated_ranks
from tfcluster.runtime.partition import tf_functions

MARK = "_XlaMustCompile"


def marks(name: str) -> set[str]:
    """The attributes for XLA of a function and of its nodes."""
    definition = tf_functions.definition_of(name)
    assert definition is not None
    found = [definition.attr, *(node.attr for node in definition.node_def)]
    return {key for attributes in found for key in attributes if "Xla" in key}


def rows() -> Any:
    return tf.constant(np.random.default_rng(1).normal(size=(12, 5)))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_a_function_that_exchanges_is_not_compiled(
    size: int, outer: bool, inner: bool
) -> None:
    def centered(x: Any) -> Any:
        return x - tf.reduce_mean(x, 0)

    called = tf.function(centered, jit_compile=inner or None)

    def step(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = tf.reduce_mean(tf.tanh(tf.linalg.matvec(called(x), w)) ** 2)
        return loss, tape.gradient(loss, w)

    compiled = tf.function(step, jit_compile=outer or None)
    w = tf.constant(np.linspace(-1.0, 1.0, 5))
    expected = compiled(rows(), w)
    with simulated_ranks(size) as hook:
        found = compiled(rows(), w)
    (program,) = hook.programs
    assert program.is_divided
    assert not marks(program.name)
    for one, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), whole.numpy(), 1e-12)


def test_a_compiled_function_without_exchanges_stays_compiled() -> None:
    product = tf.function(lambda x: tf.linalg.matmul(x, x) + 1.0, jit_compile=True)
    small = tf.constant(np.eye(1))  # Has no rows to divide.
    expected = product(small)
    with simulated_ranks(2) as hook:
        np.testing.assert_array_equal(product(small).numpy(), expected.numpy())
    (program,) = hook.programs
    assert not program.is_divided
    assert MARK in marks(program.name)


def test_fit_of_a_compiled_model_is_divided() -> None:
    def trained() -> list[Any]:
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization()]
        model = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True)
        draw = np.random.default_rng(2)
        x, y = draw.normal(size=(30, 5)), draw.normal(size=(30, 1))
        history = model.fit(x, y, batch_size=12, epochs=2, verbose=0).history["loss"]
        return [*model.get_weights(), np.array(history)]

    expected = trained()
    with simulated_ranks(2) as hook:
        found = trained()
    assert any(each.is_divided and each.trains for each in hook.programs)
    assert not any(marks(each.name) for each in hook.programs if each.is_divided)
    for one, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, whole, 1e-4, 1e-6)
