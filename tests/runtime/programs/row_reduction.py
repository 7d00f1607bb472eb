# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Prints how numbers of a graph depend on the rows of a batch: ``{NAME: KIND}``."""

from __future__ import annotations

import json

import keras
import tensorflow as tf

from tfcluster.runtime.keras.losses.row_reduction import Reductions

weight = tf.Variable(tf.ones((3, 2)))
mean = tf.reduce_mean


def by_row(x):
    return tf.reduce_sum((x @ weight) ** 2, -1)


NUMBERS = {
    "mean": lambda x: mean(by_row(x)),
    "mean_of_everything": lambda x: mean(x @ weight),
    "mean_over_rows_then_sum": lambda x: tf.reduce_sum(mean(x, 0)),
    "scaled_mean": lambda x: 0.5 * mean(by_row(x)) / 3.0,
    "mean_with_a_penalty": lambda x: mean(by_row(x)) + tf.nn.l2_loss(weight),
    "difference_of_means": lambda x: mean(by_row(x)) - mean(x[:, 0]),
    "sum_by_its_rows": lambda x: (
        tf.reduce_sum(by_row(x)) / tf.cast(tf.shape(x)[0], tf.float32)
    ),
    "sum_by_its_size": lambda x: tf.reduce_sum(x**2) / tf.cast(tf.size(x), tf.float32),
    "of_keras": lambda x: keras.losses.MeanSquaredError()(tf.zeros_like(x), x),
    "sum": lambda x: tf.reduce_sum(by_row(x)),
    "sum_by_a_constant": lambda x: tf.reduce_sum(by_row(x)) / 8.0,
    "sum_by_features": lambda x: (
        tf.reduce_sum(x**2) / tf.cast(tf.shape(x)[1], tf.float32)
    ),
    "rows": by_row,
    "half_the_squares": tf.nn.l2_loss,
    "weights_only": lambda x: tf.reduce_sum(weight**2),
    "mean_and_sum": lambda x: mean(by_row(x)) + tf.reduce_sum(by_row(x)),
    "root_of_a_mean": lambda x: tf.sqrt(mean(by_row(x))),
    "largest": lambda x: tf.reduce_max(by_row(x)),
    "product": lambda x: mean(by_row(x)) * tf.reduce_sum(x),
    "masked": lambda x: (
        tf.reduce_sum(by_row(x)) / tf.reduce_sum(tf.cast(x > 0, tf.float32))
    ),
}
kinds: dict[str, str] = {}


@tf.function(input_signature=[tf.TensorSpec([None, 3])])
def trace(x):
    reductions = Reductions(
        lambda tensor: bool(tensor.shape.rank) and tensor.shape[0] is None,
        lambda _: False,
    )
    for name, number in NUMBERS.items():
        kinds[name] = reductions.of(number(x)).name
    return x


trace.get_concrete_function()
print(json.dumps(kinds))
