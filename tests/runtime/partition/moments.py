"""Means and variances of rows in one exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.runtime.partition.installed import simulated_ranks
from tests.runtime.partition.simulated import SIZES, Divided, divide
from tfcluster.runtime.partition.placement import Shard


def rows(dtype: Any = np.float64, *, count: int = 7, mean: float = 0.3) -> Any:
    draw = np.random.default_rng(count)
    return draw.normal(mean, 1.0, size=(count, 4, 3)).astype(dtype)


def divided(function: Callable[..., Any], given: Any, size: int) -> Divided:
    return divide(function, [given], [Shard(0, len(given))], size)


def _by_squares(x: Any) -> Any:
    mean = tf.reduce_mean(x, (0, 1), keepdims=True)
    return mean, tf.reduce_mean(tf.square(x - mean), (-2, -3))


FORMS: dict[str, Callable[[Any], Any]] = {
    "all but the last": lambda x: tf.nn.moments(x, (0, 1)),
    "rows": lambda x: tf.nn.moments(x, [0], keepdims=True),
    "all": lambda x: tf.nn.moments(x, (0, 1, 2)),
    "squares": _by_squares,
    "standard deviation": tf.math.reduce_std,
    "of keras": lambda x: keras.ops.moments(x, axes=(0, 2)),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_one_exchange_has_both(form: str, size: int) -> None:
    found = divided(FORMS[form], rows(), size)
    found.assert_equal(1e-12)
    assert found.written.exchanges == 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_ranks_may_have_no_rows(count: int) -> None:
    found = divided(FORMS["rows"], rows(count=count), 5)
    found.assert_equal(1e-12)


@pytest.mark.parametrize("mean", [0.0, 1e3, 1e5])
def test_no_digits_are_lost_if_the_mean_is_large(mean: float) -> None:
    given = rows(np.float32, count=600, mean=mean)
    given[:200] += 3.0  # else it would not matter that the ranks' means are rounded
    found = divided(FORMS["all but the last"], given, 3)
    own, whole = (
        np.abs(np.asarray(each[1], np.float64) - given.astype(float).var((0, 1))).max()
        for each in (found.found, found.whole)
    )
    # The squares of the float32 numbers alone have errors of 0.1 and 1000.
    assert own < max(10 * whole, 1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(value: float) -> None:
    given = rows()
    given[2, 1, 1] = value
    divided(FORMS["all but the last"], given, 2).assert_equal(1e-12)


def test_moments_within_rows_are_not_changed() -> None:
    found = divided(lambda x: tf.nn.moments(x, (1, 2)), rows(), 2)
    found.assert_equal()
    assert found.outputs == [Shard(0, 7), Shard(0, 7)]


def test_gradients() -> None:
    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            mean, variance = tf.nn.moments(x, (0, 1))
            loss = tf.reduce_sum((x - mean) ** 3 * tf.math.rsqrt(variance + 1e-3))
        return loss, tape.gradient(loss, x)

    divided(gradient, rows(), 3).assert_equal(1e-11)


def test_a_loop_around_moments() -> None:
    def looped(x: Any) -> Any:
        for _ in tf.range(3):
            mean, variance = tf.nn.moments(x, (0, 1))
            x = (x - mean) * tf.math.rsqrt(variance + 0.1)
        return x

    given = rows()
    traced = tf.function(looped)
    expected = traced(given)
    with simulated_ranks(2):
        found = traced(tf.constant(given))
    np.testing.assert_allclose(found, expected, 1e-11)
