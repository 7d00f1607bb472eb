"""Strings that are split, and become rows of a fixed length, are divided by rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.runtime.partition.cases import assert_equal, traced
from tests.runtime.partition.installed import simulated_ranks
from tests.runtime.partition.simulated import Divided, divide
from tfcluster.runtime.partition.placement import Shard

TEXTS = ["b a c, a", "", "  ", "a", "d d d d d d d d", "c a", "b", "e b a!"] * 2
ROWS = len(TEXTS)
VOCABULARY = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer(["a", "b", "c"], [3, 4, 5]), 9
)


def vectorized(**options: Any) -> Callable[[Any], Any]:
    layer = keras.layers.TextVectorization(max_tokens=6, **options)
    layer.adapt(TEXTS)
    return lambda texts: layer(texts)


def padded(texts: Any, columns: int | None = 4) -> Any:
    words = tf.strings.split(texts)
    return VOCABULARY.lookup(words).to_tensor(0, shape=[None, columns])


def by_row_splits(texts: Any) -> Any:
    words = tf.strings.split(texts)
    splits = words.row_splits
    again = tf.RaggedTensor.from_row_splits(words.flat_values, splits, validate=False)
    lengths = again.with_flat_values(tf.strings.length(again.flat_values))
    return lengths.to_tensor(-1, shape=[None, 3])


def with_a_number_of_all_rows(texts: Any) -> Any:
    """Each entry depends on how many entries all strings have."""
    words = tf.strings.split(texts)
    numbers = tf.strings.length(words.flat_values) * tf.size(words.flat_values)
    return words.with_flat_values(numbers).to_tensor(0, shape=[None, 3])


DIVIDED: dict[str, Callable[[Any], Any]] = {
    "padded": padded,
    "by row splits": by_row_splits,
    "of a fixed length": vectorized(output_sequence_length=3),
    "n-grams": vectorized(output_sequence_length=3, ngrams=(1, 2)),
    "multi-hot": vectorized(output_mode="multi_hot"),
    "counts of n-grams": vectorized(output_mode="count", ngrams=2),
    "TF-IDF": vectorized(output_mode="tf_idf"),
}


def divided_by_rows(function: Callable[[Any], Any], size: int) -> Divided:
    found = divide(function, [TEXTS], [Shard(0, ROWS)], size, ROWS)
    found.assert_equal()
    assert any(node.type == "PartitionedCall" for node in found.placed.nodes)
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", DIVIDED)
def test_rows_depend_on_one_string_each(name: str, size: int) -> None:
    found = divided_by_rows(DIVIDED[name], size)
    assert found.outputs == [Shard(0, ROWS)]
    assert not found.computed_whole
    assert not found.written.exchanged[:-1]  # The last makes the result whole.


def test_what_depends_on_all_strings_is_computed_before() -> None:
    found = divide(with_a_number_of_all_rows, [TEXTS], [Shard(0, ROWS)], 2, ROWS)
    found.assert_equal()
    assert found.outputs == [Shard(0, ROWS)]


def reversed_rows(texts: Any) -> Any:
    words = tf.strings.split(texts)
    return tf.reverse(words.flat_values, [0])[:3]


def of_other_rows(texts: Any) -> Any:
    words = tf.strings.split(texts)
    shifted = tf.roll(tf.strings.length(words.flat_values), 1, 0)
    return words.with_flat_values(shifted).to_tensor(0, shape=[None, 3])


def with_other_numbers_of_rows(texts: Any) -> Any:
    words = tf.strings.split(texts)
    numbers = tf.reverse(words.value_rowids(), [0])[::-1] // 2
    again = tf.RaggedTensor.from_value_rowids(words.flat_values, numbers, ROWS)
    return tf.strings.length(again.to_tensor("", shape=[None, 3]))


WHOLE: dict[str, Callable[[Any], Any]] = {
    "of any length": lambda texts: padded(texts, None),
    "entries of other rows": of_other_rows,
    "other rows": with_other_numbers_of_rows,
}


@pytest.mark.parametrize("name", WHOLE)
def test_other_rows_are_computed_whole(name: str) -> None:
    found = divide(WHOLE[name], [TEXTS], [Shard(0, ROWS)], 2, ROWS)
    found.assert_equal()
    assert not any(node.type == "PartitionedCall" for node in found.placed.nodes)


def counted(texts: Any) -> Any:
    total, joined = tf.constant(0), tf.constant("")
    for text in texts:
        total += tf.strings.length(text)
        joined = tf.strings.join([joined, text])
    return total, joined


def listed(texts: Any) -> Any:
    found = tf.TensorArray(tf.string, ROWS)
    for row in tf.range(ROWS):
        found = found.write(row, tf.strings.upper(texts[row]))
    return tf.strings.reduce_join(found.stack())


WITH_STRINGS: dict[str, Callable[[Any], Any]] = {
    "a loop over strings": counted,
    "a list of strings": listed,
    "map_fn to numbers": lambda texts: tf.map_fn(
        tf.strings.length, texts, fn_output_signature=tf.int32
    ),
    "map_fn to strings": lambda texts: tf.map_fn(tf.strings.upper, texts),
    "chosen": lambda texts: tf.boolean_mask(texts, tf.strings.length(texts) > 2),
    "gathered": lambda texts: tf.gather(texts, tf.range(ROWS)[::-1]),
    "joined to others": lambda texts: tf.concat([texts, ["x"]], 0),
    "compared": lambda texts: tf.where(texts == "a", "yes", texts),
    "unique": lambda texts: tf.unique(texts)[0],
    "joined": lambda texts: tf.strings.reduce_join(texts, 0),
    "reshaped": lambda texts: tf.strings.length(tf.reshape(texts, [ROWS // 2, 2])),
    "returned": tf.strings.upper,
    "split": lambda texts: tf.strings.split(texts).values,
    "counts": lambda texts: tf.strings.split(texts).row_lengths(),
    "numbers in strings": lambda texts: tf.strings.as_string(tf.strings.length(texts)),
}


@pytest.mark.parametrize("name", WITH_STRINGS)
def test_functions_of_strings(name: str) -> None:
    @traced
    def function(texts: Any, numbers: Any) -> Any:
        return WITH_STRINGS[name](texts), numbers * 2

    def make() -> list[Any]:
        found = function(tf.constant(TEXTS), tf.range(ROWS))
        return [each.numpy() for each in tf.nest.flatten(found)]

    alone = make()
    with simulated_ranks(2, strict=True):
        found = make()
    for one, other in zip(alone, found, strict=True):
        assert np.array_equal(one, other)


def test_a_model_of_strings_is_divided() -> None:
    layer = vectorized(output_mode="multi_hot")

    def make() -> Any:
        weights = tf.Variable(tf.ones((6, 1)))

        @traced
        def step(texts: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                found = tf.cast(layer(texts), tf.float32) @ weights
                loss = tf.reduce_mean((found - labels) ** 2)
            weights.assign_sub(0.1 * tape.gradient(loss, weights))
            return loss

        labels = tf.reshape(tf.range(float(ROWS)), (-1, 1))
        return *(step(tf.constant(TEXTS), labels) for _ in range(2)), weights

    assert assert_equal(make) == 1


def test_equal_functions_have_one_name() -> None:
    names = {
        python_name(node)
        for _ in range(2)
        for node in divided_by_rows(padded, 2).placed.nodes
        if node.type == "PartitionedCall"
    }
    assert len(names) == 1
    assert np.char.startswith(names.pop(), "tfcluster_ragged_rows_")


def python_name(node: Any) -> str:
    name: str = node.attribute("f").name
    return name
