"""Loops and branches, whose values may change their placement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

from tests.runtime.partition.rule_checks import Chance, few, seeds
from tests.runtime.partition.simulated import divide
from tfcluster.runtime.partition.placement import REPLICATE, Placement, Shard

# Functions of rows of 3 numbers, and of one number that is whole.


def _loop(condition: Any, body: Any, *values: Any) -> Any:
    return tf.while_loop(condition, body, values)


def _carried_rows(x: Any, n: Any) -> Any:
    return _loop(lambda t, a: t < n, lambda t, a: (t + 1, a * 0.5 + x), 0, x)


def _whole_becomes_rows(x: Any, n: Any) -> Any:
    return _loop(lambda t, a: t < n, lambda t, a: (t + 1, a + x), 0, tf.zeros_like(x))


def _constant_becomes_rows(x: Any, n: Any) -> Any:
    return _loop(lambda t, a: t < n, lambda t, a: (t + 1, a + x), 0, tf.ones(x.shape))


def _rows_become_whole(x: Any, n: Any) -> Any:
    ones = tf.ones(x.shape)
    return _loop(lambda t, a: t < n, lambda t, a: (t + 1, ones * 2.0), 0, x)


def _rows_and_rest_change_places(x: Any, n: Any) -> Any:
    ones = tf.ones(x.shape)
    return _loop(lambda t, *_: t < n, lambda t, a, b: (t + 1, b, a), 0, x, ones)


def _terms_are_carried(x: Any, n: Any) -> Any:
    """A sum over the rows is added up over the loop."""
    start = tf.zeros(x.shape[1:])
    return _loop(
        lambda t, a: t < n, lambda t, a: (t + 1, a + tf.reduce_sum(x, 0)), 0, start
    )


def _terms_become_something_else(x: Any, n: Any) -> Any:
    start = tf.reduce_sum(x, 0)
    return _loop(
        lambda t, a: t < n,
        lambda t, a: (t + 1, tf.nn.relu(a) + tf.reduce_sum(x * a, 0) / 8.0),
        0,
        start,
    )


def _largest(x: Any, n: Any) -> Any:
    return _loop(
        lambda t, a: t < n,
        lambda t, a: (t + 1, tf.maximum(a, tf.reduce_max(x, 0) + 1.0)),
        0,
        tf.reduce_max(x, 0),
    )


def _rows_and_terms_change_places(x: Any, n: Any) -> Any:
    square = tf.matmul(x, x, transpose_b=True)
    terms = tf.transpose(x) @ x
    del square

    def body(t: Any, a: Any, b: Any) -> Any:
        return t + 1, b, a * 0.5

    return _loop(lambda t, *_: t < n, body, 0, x[:3], terms)


def _transposed(x: Any, n: Any) -> Any:
    """The rows change their dimension in each step."""
    square = tf.matmul(x, x, transpose_b=True)
    return _loop(
        lambda t, a: t < n, lambda t, a: (t + 1, tf.transpose(a) + 1.0), 0, square
    )


def _until_the_rows_say_so(x: Any, n: Any) -> Any:
    return _loop(
        lambda t, a: tf.reduce_any(tf.abs(a) > 0.5) & (t < 9),
        lambda t, a: (t + 1, a * 0.5),
        0,
        x,
    )


def _until_a_sum_says_so(x: Any, n: Any) -> Any:
    return _loop(
        lambda t, a, s: (s < 100.0) & (t < 9),
        lambda t, a, s: (t + 1, a * 2.0, s + tf.reduce_sum(a * a)),
        *(0, x, tf.reduce_sum(x)),
    )


def _until_each_row_is_done(x: Any, n: Any) -> Any:
    def body(t: Any, a: Any, done: Any) -> Any:
        a = tf.where(done[:, tf.newaxis], a, a * 0.5)
        return t + 1, a, tf.reduce_all(tf.abs(a) < 0.5, 1)

    done = tf.zeros(x.shape[:1], tf.bool)
    return _loop(lambda t, a, done: ~tf.reduce_all(done) & (t < 9), body, 0, x, done)


def _nested_loops(x: Any, n: Any) -> Any:
    def outer(t: Any, a: Any) -> Any:
        _, a = _loop(
            lambda k, a: k <= t, lambda k, a: (k + 1, a + tf.reduce_sum(a, 0) / 4), 0, a
        )
        return t + 1, a

    return _loop(lambda t, a: t < n, outer, 0, x)


def _counts_in_a_nested_loop(x: Any, n: Any) -> Any:
    def outer(t: Any, a: Any, s: Any) -> Any:
        def inner(k: Any, a: Any, s: Any) -> Any:
            return k + 1, tf.transpose(a), s + tf.reduce_max(a)

        _, a, s = _loop(lambda k, *_: k < n, inner, 0, a, s)
        return t + 1, a, s

    square = tf.matmul(x, x, transpose_b=True)
    return _loop(lambda t, *_: t < 2, outer, 0, square, 0.0)


def _shapes_grow(x: Any, n: Any) -> Any:
    return tf.while_loop(
        lambda t, a: t < n,
        lambda t, a: (t + 1, tf.concat([a, x], 0)),
        (0, x),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, 3])),
    )


def _columns_grow(x: Any, n: Any) -> Any:
    return tf.while_loop(
        lambda t, a: t < n,
        lambda t, a: (t + 1, tf.concat([a, x], 1)),
        (0, x),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([x.shape[0], None])),
    )


def _branch_by_the_data(x: Any, n: Any) -> Any:
    return tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2.0, lambda: x + 1.0)


def _branch_by_a_row(x: Any, n: Any) -> Any:
    return tf.cond(x[0, 0] > 0, lambda: x * 2.0, lambda: x + 1.0)


def _exchanges_in_branches(x: Any, n: Any) -> Any:
    mean = tf.reduce_mean(x, 0)
    return tf.cond(
        tf.reduce_max(x) > 2.0,
        lambda: (x - tf.reduce_mean(x * x, 0), tf.nn.relu(mean)),
        lambda: (x / (1.0 + tf.reduce_max(x, 0) ** 2.0), mean * 2.0),
    )


def _branches_of_other_placements(x: Any, n: Any) -> Any:
    ones = tf.ones(x.shape)
    square = tf.matmul(x, x, transpose_b=True)
    total = tf.reduce_sum(x, 0)
    return [
        tf.cond(chosen, yes, no)
        for chosen in (tf.reduce_sum(x) > 0, tf.reduce_sum(x) <= 0)
        for yes, no in (
            (lambda: x * 2.0, lambda: ones * 2.0),
            (lambda: square, lambda: tf.transpose(square) * 2.0),
            (lambda: tf.reduce_sum(x, 0), lambda: tf.ones(3)),
            (lambda: tf.reduce_sum(x, 0), lambda: tf.reduce_max(x, 0)),
            (lambda: total, lambda: total * 2.0),
            (lambda: tf.transpose(x) @ x, lambda: x[:3]),
        )
    ]


def _branches_of_other_shapes(x: Any, n: Any) -> Any:
    taken = tf.cond(tf.reduce_sum(x) > 0, lambda: x[:2], lambda: x)
    other = tf.cond(n > 1, lambda: tf.ones([1, 3]), lambda: x)
    columns = tf.cond(n > 1, lambda: x[:, :2], lambda: x)
    return taken * 2.0, tf.reduce_sum(taken, 0), other, tf.reduce_max(columns, 0)


def _case(x: Any, n: Any) -> Any:
    return tf.switch_case(
        tf.cast(n, tf.int32),
        [
            lambda: x,
            lambda: x - tf.reduce_mean(x, 0),
            lambda: tf.ones(x.shape),
            lambda: tf.nn.relu(x),
        ],
    )


def _case_by_the_data(x: Any, n: Any) -> Any:
    number = tf.cast(tf.reduce_sum(tf.abs(x)), tf.int32) % 4
    return tf.switch_case(
        number, [lambda: x, lambda: x - tf.reduce_mean(x, 0), lambda: x * 2.0]
    )


def _branch_in_a_loop(x: Any, n: Any) -> Any:
    def body(t: Any, a: Any) -> Any:
        return t + 1, tf.cond(
            tf.reduce_sum(a) > 0.1, lambda: a - tf.reduce_mean(a, 0), lambda: a + 1.0
        )

    return _loop(lambda t, a: t < n, body, 0, x)


def _loop_in_a_branch(x: Any, n: Any) -> Any:
    return tf.cond(
        tf.reduce_sum(x) > 0,
        lambda: _loop(
            lambda t, a: t < n,
            lambda t, a: (t + 1, a - tf.reduce_mean(a, 0)),
            *(0, x),
        )[1],
        lambda: x,
    )


def _constant_branch(x: Any, n: Any) -> Any:
    return tf.cond(tf.constant(True) & (tf.shape(x)[0] > 0), lambda: x * 2.0, lambda: x)


FORMS = [
    value
    for name, value in list(globals().items())
    if name.startswith("_")
    and (getattr(value, "__module__", "") == __name__ and name != "_loop")
]


def _divided_and_equal(
    function: Callable[..., Any], seed: int, tolerance: float = 1e-6
) -> None:
    chance = Chance(seed)
    rows = max(chance.rows, 3)
    x = chance.numbers((rows, 3))
    n = np.array(chance.below(4), np.int32)
    placements: list[Placement] = [Shard(0, rows), REPLICATE]
    divide(function, [x, n], placements, chance.size, rows).assert_equal(tolerance)


@pytest.mark.parametrize("function", FORMS, ids=lambda f: f.__name__[1:])
@given(seeds)
@few
def test_values(function: Callable[..., Any], seed: int) -> None:
    _divided_and_equal(function, seed)


# Without gradients: shapes that vary, and a value that becomes another.
NO_GRADIENTS = {_shapes_grow, _columns_grow}


@pytest.mark.parametrize(
    "function",
    [each for each in FORMS if each not in NO_GRADIENTS],
    ids=lambda f: f.__name__[1:],
)
@given(seeds)
@few
def test_gradients(function: Callable[..., Any], seed: int) -> None:
    def both(x: Any, n: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = tf.nest.flatten(function(x, n))
            numbers = [each for each in found if each.dtype == tf.float32]
            loss = tf.add_n([tf.reduce_sum(each * each) for each in numbers])
        gradient = tape.gradient(loss, x)
        return loss, tf.zeros(()) if gradient is None else gradient

    _divided_and_equal(both, seed, 1e-5)
