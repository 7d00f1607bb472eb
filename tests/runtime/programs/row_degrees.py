"""Checks how numbers that are computed from a batch scale with its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tests.runtime.programs import checks
from tfcluster.runtime.keras.checks.op_replay import ops_of
from tfcluster.runtime.keras.checks.row_degrees import degree

ROWS = 6

MEANS: list[Callable[[Any], Any]] = [
    tf.reduce_mean,
    lambda x: tf.reduce_mean(tf.reduce_sum(x, 1)),
    lambda x: tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], tf.float32),
    lambda x: tf.reduce_sum(x) / tf.cast(tf.size(x), tf.float32),
    lambda x: 0.5 * tf.reduce_mean(x) + tf.reduce_mean(tf.square(x)),
    lambda x: tf.sqrt(tf.reduce_mean(tf.square(x))),
    lambda x: tf.reduce_mean(tf.matmul(x, tf.ones((3, 2)))),
    tf.reduce_max,
]
SUMS: list[Callable[[Any], Any]] = [
    tf.reduce_sum,
    lambda x: tf.reduce_sum(tf.reduce_mean(x, 1)),
    lambda x: tf.reduce_sum(tf.reduce_sum(x, 0)),
    lambda x: tf.reduce_sum(x) / 2.5,
    lambda x: tf.reduce_mean(x) * tf.cast(tf.shape(x)[0], tf.float32),
    lambda x: tf.reduce_sum(tf.cast(x > 0, tf.float32)),
]
OTHERS: list[Callable[[Any], Any]] = [
    lambda x: tf.reduce_mean(x) + tf.reduce_sum(x),
    lambda x: tf.sqrt(tf.reduce_sum(tf.square(x))),
    lambda x: tf.reduce_mean(tf.matmul(x, x, transpose_a=True)),
]


def degree_of(number: Callable[[Any], Any], rows: int | None) -> float | None:
    found: list[float | None] = []

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        value = number(x)
        found.append(degree(ops_of(value.graph), [x], value, rows))
        return value

    spec = tf.TensorSpec((rows, 3), tf.float32)
    tf.function(step).get_concrete_function(spec)
    return found[0]


def check_a_mean_does_not_grow() -> None:
    assert [degree_of(number, None) for number in MEANS] == [0.0] * len(MEANS)


def check_a_sum_grows_with_the_rows() -> None:
    assert [degree_of(number, None) for number in SUMS] == [1.0] * len(SUMS)


def check_others_are_not_known() -> None:
    for number in OTHERS:
        assert degree_of(number, None) not in (0.0, 1.0)


def check_a_constant_may_be_made_of_the_rows() -> None:
    numbers: list[tuple[Callable[[Any], Any], float]] = [
        (tf.reduce_mean, 0.0),
        (tf.reduce_sum, 1.0),
        (lambda x: tf.reduce_sum(x) / ROWS, 0.0),
        (lambda x: tf.reduce_sum(x) / (3 * ROWS), 0.0),
        (lambda x: tf.reduce_sum(x) * (1.0 / ROWS), 0.0),
        (lambda x: tf.reduce_sum(x) / 5.0, 1.0),
        (lambda x: tf.reduce_sum(x) * 0.0, 1.0),
    ]
    for number, expected in numbers:
        assert degree_of(number, ROWS) == expected


def check_a_number_without_rows_is_an_error() -> None:
    try:
        degree_of(lambda x: tf.constant(1.0), None)
    except KeyError:
        return
    raise AssertionError


if __name__ == "__main__":
    checks.run(globals())
