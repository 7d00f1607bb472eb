"""Random numbers: on all ranks those of one machine, call after call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from numpy.typing import NDArray

from tests.runtime.partition.installed import simulated_ranks
from tests.runtime.partition.rule_checks import Chance, seeds
from tests.runtime.partition.simulated import SIZES, divide
from tfcluster.runtime.partition.placement import REPLICATE, Shard

Array = NDArray[Any]
few = settings(max_examples=4, deadline=None)
BATCHES = (7, 5, 7, 6)


@given(seeds)
@few
def test_stateless_draws(seed: int) -> None:
    chance = Chance(seed)
    rows = chance.rows
    x = chance.numbers((rows, 3))
    alpha = np.abs(chance.numbers((rows, 3))) + 0.5
    shape = [rows, 3]
    random = tf.random

    def function(x: Any, alpha: Any) -> Any:
        key = tf.constant([seed, 2], tf.int64)
        drawn = [
            random.stateless_uniform(shape, key),
            random.stateless_normal(shape, key, dtype=tf.float64),
            random.stateless_truncated_normal(shape, key),
            random.stateless_uniform(shape, key, 0, 9, tf.int32),
            random.stateless_uniform(shape, key, None, None, tf.int32),
            random.stateless_gamma(shape, key, alpha),
            random.stateless_poisson(shape, key, alpha),
            random.stateless_binomial(shape, key, [4.0] * 3, [0.5] * 3),
            random.stateless_categorical(x, 2, key),
            random.stateless_parameterized_truncated_normal(shape, key, x),
        ]
        others = [
            random.stateless_uniform([2, 3], key),
            random.stateless_normal([], key),
        ]
        return [*drawn, *others, x * drawn[0]]

    shard = Shard(0, rows)
    found = divide(function, [x, alpha], [shard, shard], chance.size, rows)
    found.assert_equal()
    if rows > 2:
        assert found.outputs == [*[shard] * 10, REPLICATE, REPLICATE, shard]


def _shape(x: Any) -> Any:
    return tf.shape(x)


# Iterations of a loop that run at once would draw in any order, on one machine as well.
DRAWS: dict[str, Callable[[Any], Any]] = {
    "uniform": lambda x: tf.random.uniform(_shape(x), seed=1) * x,
    "normal": lambda x: tf.random.normal(_shape(x), seed=1) * x,
    "truncated normal": lambda x: tf.random.truncated_normal(_shape(x), seed=1) * x,
    "integers": lambda x: tf.random.uniform(_shape(x), 0, 99, tf.int32, seed=1),
    "half": lambda x: tf.random.normal(_shape(x), dtype=tf.float16, seed=1),
    "double": lambda x: tf.random.uniform(_shape(x), dtype=tf.float64, seed=1),
    "two of the same seed": lambda x: [
        tf.random.uniform(_shape(x), seed=1),
        tf.random.uniform(_shape(x), seed=1) + x,
    ],
    "not by rows": lambda x: tf.random.normal([3], seed=1) * tf.reduce_sum(x, 0),
    "dropout": lambda x: tf.nn.dropout(x, 0.5, seed=1),
    "gamma": lambda x: tf.random.gamma([2], tf.abs(x) + 0.5, seed=1),
    "gamma of one parameter": lambda x: tf.random.gamma(_shape(x)[:1], 1.5, seed=1),
    "poisson": lambda x: tf.random.poisson([2], tf.abs(x), seed=1),
    "poisson by rows": lambda x: tf.random.poisson(_shape(x), 1.5, seed=1),
    "categorical": lambda x: tf.random.categorical(x, 4, seed=1),
    "shuffle": lambda x: tf.random.shuffle(x, seed=1) * 2.0,
    "crop": lambda x: tf.image.random_crop(x, [2, 2], seed=1),
    "parameterized": lambda x: tf.raw_ops.ParameterizedTruncatedNormal(
        shape=_shape(x),
        means=0.5,
        stdevs=1.5,
        minvals=-1.0,
        maxvals=2.0,
        seed=1,
        seed2=2,
    ),
    "classes": lambda x: tf.random.log_uniform_candidate_sampler(
        tf.cast(tf.abs(x[:, :1]), tf.int64), 1, 3, True, 9, seed=1
    )[0],
    # TensorFlow's shape for the second result is wrong.
    "fractional": lambda x: tf.nn.fractional_max_pool(
        tf.reshape(tf.tile(x[:1, :1], [8, 8]), [1, 8, 8, 1]), [1, 1.4, 1.4, 1], seed=1
    )[:2],
    "in a branch": lambda x: tf.cond(
        tf.reduce_sum(x) > 0,
        lambda: tf.random.uniform(_shape(x), seed=1),
        lambda: tf.random.uniform(_shape(x), seed=1) + 1.0,
    ),
    "in a loop": lambda x: tf.while_loop(
        lambda t, a: (t < 3) & (tf.random.uniform([], seed=1) < 0.9),
        lambda t, a: (t + 1, a + tf.random.uniform(_shape(x), seed=1)),
        (0, x),
        parallel_iterations=1,
    ),
    "shuffle in a loop": lambda x: tf.while_loop(
        lambda t, a: t < 3,
        lambda t, a: (t + 1, a + tf.random.shuffle(x, seed=1)),
        (0, x),
        parallel_iterations=1,
    ),
}


def _calls(draw: Callable[[Any], Any], again: int | None = None) -> list[Array]:
    """The results of calls with batches of several sizes."""
    tf.random.set_seed(4)
    function = tf.function(
        draw,
        input_signature=[tf.TensorSpec([None, 3], tf.float32)],
        autograph=False,
    )
    found: list[Array] = []
    for index, rows in enumerate(BATCHES):
        if index == again:
            tf.random.set_seed(4)
        x = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) / 8.0 - 1.0
        found += [np.asarray(each) for each in tf.nest.flatten(function(x))]
    return found


def _assert_same(first: list[Array], second: list[Array]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", DRAWS)
def test_draws_go_on_over_batches_of_all_sizes(kind: str) -> None:
    expected = _calls(DRAWS[kind])
    for size in (2, 3):
        with simulated_ranks(size) as hook:
            found = _calls(DRAWS[kind])
        assert len(hook.programs) == 3
        _assert_same(expected, found)


def test_what_needs_the_shape_of_an_exchanged_tensor_runs_once() -> None:
    """The shape is known before the tensor, for whose exchange the program waits."""

    def calls() -> list[Array]:
        tf.random.set_seed(4)
        count = tf.Variable(0)

        def function(x: Any) -> Any:
            y = x / tf.reduce_sum(x)
            count.assign_add(tf.size(y))
            return y + tf.random.normal(tf.shape(y))

        spec = tf.TensorSpec([None, 3], tf.float32)
        traced = tf.function(function, input_signature=[spec], autograph=False)
        drawn = [np.asarray(traced(np.ones((rows, 3)))) for rows in BATCHES]
        return [*drawn, np.asarray(count)]

    expected = calls()
    for size in (2, 3):
        with simulated_ranks(size, call=True):
            found = calls()
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-6)


def test_draws_in_a_branch_whose_gradient_is_computed() -> None:
    """What the branch keeps for its gradient is no batch that a loop takes."""

    def calls() -> list[Array]:
        tf.random.set_seed(4)
        scale, goes = tf.Variable(1.0), tf.Variable(True)

        def drawn(x: Any) -> Any:
            number = tf.random.uniform([tf.shape(x)[0], 1], 0, 9, tf.int32)
            y = x + tf.cast(number, tf.float32)
            return tf.ensure_shape(tf.reshape(y, tf.shape(x)), x.shape)

        def function(x: Any) -> Any:
            with tf.GradientTape() as tape:
                y = tf.cond(goes, lambda: drawn(x * scale), lambda: x * scale)
                loss = tf.reduce_mean(tf.sin(y))
            scale.assign_sub(0.1 * tape.gradient(loss, scale))
            return loss

        spec = tf.TensorSpec([None, 2], tf.float32)
        traced = tf.function(function, input_signature=[spec], autograph=False)
        return [np.asarray(traced(np.ones((5, 2)))) for _ in range(4)]

    expected = calls()
    with simulated_ranks(2):
        np.testing.assert_allclose(calls(), expected, rtol=1e-5)


@pytest.mark.parametrize("kind", ["uniform", "gamma", "shuffle"])
def test_draws_begin_anew_where_kernels_do(kind: str) -> None:
    """``tf.random.set_seed`` lets the ops of traced functions begin anew."""
    expected = _calls(DRAWS[kind], again=2)
    with simulated_ranks(3):
        _assert_same(expected, _calls(DRAWS[kind], again=2))
    assert np.array_equal(expected[0], expected[2])


def _unseeded(x: Any) -> Any:
    return [
        tf.random.uniform(_shape(x)),
        tf.random.normal([2]),
        tf.random.gamma(_shape(x)[:1], 1.5),
        tf.random.shuffle(x),
        tf.random.categorical(x, 4),
        tf.random.poisson([2], tf.abs(x)),
        tf.nn.dropout(x, 0.5),
    ]


def test_draws_without_seeds_are_equal_on_all_ranks() -> None:
    """They are not those of one machine, but any two ranks draw the same."""
    results = []
    for _ in range(2):
        tf.random.set_seed(None)
        function = tf.function(
            _unseeded,
            input_signature=[tf.TensorSpec([None, 3], tf.float32)],
            autograph=False,
        )
        with simulated_ranks(2):
            results.append(
                [
                    np.asarray(each)
                    for rows in BATCHES
                    for each in function(np.ones((rows, 3), np.float32))
                ]
            )
    _assert_same(*results)
    assert not np.array_equal(results[0][0], results[0][14])


def _generator(_: None = None) -> list[Array]:
    tf.random.set_seed(1)
    generator = tf.random.Generator.from_seed(3)

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32)])  # type: ignore[untyped-decorator]
    def function(x: Any) -> Any:
        shape = tf.shape(x)
        generator.uniform([2])  # It counts even if nobody needs its numbers.
        return (
            generator.normal(shape) * x,
            generator.uniform(shape, 0, 9, tf.int32),
            generator.binomial(shape, [4.0] * 3, [0.5] * 3),
            generator.truncated_normal([3]),
            generator.make_seeds(2),
        )

    found: list[Array] = []
    for rows in BATCHES:
        found += [np.asarray(each) for each in function(np.ones((rows, 3), "float32"))]
    return [*found, generator.state.numpy()]


def _keras_dropout() -> list[Array]:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.GaussianNoise(0.5, seed=3),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(2),
            keras.layers.Dropout(0.2, seed=2),
        ]
    )
    function = tf.function(
        lambda x: model(x, training=True),
        input_signature=[tf.TensorSpec([None, 4], tf.float32)],
    )
    found = [np.asarray(function(np.ones((rows, 4), np.float32))) for rows in BATCHES]
    seeds = [each.numpy() for each in model.non_trainable_variables]
    return [*found, *map(np.asarray, seeds)]


@pytest.mark.parametrize("script", [_generator, _keras_dropout])
@pytest.mark.parametrize("size", SIZES)
def test_states_in_variables(script: Callable[[], list[Array]], size: int) -> None:
    expected = script()
    with simulated_ranks(size):
        found = script()
    if script is _generator:
        _assert_same(expected, found)
        return
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
