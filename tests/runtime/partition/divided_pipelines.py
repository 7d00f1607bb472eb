"""Ranks compute their own rows of each batch of a dataset, equal to those of one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfcluster.runtime.partition import tf_datasets
from tfcluster.runtime.partition.input_parts import DividedPipeline
from tfcluster.runtime.partition.input_pipelines import BatchPipeline, divided
from tfcluster.runtime.partition.part_iterators import DividedInputs, PartIterator
from tfcluster.runtime.partition.placement import Split
from tfcluster.runtime.partition.taken_batches import TakenElement
from tfcluster.runtime.tensor_types import Array

Dataset = Any
Make = Callable[[], Dataset]
LINE = tf.TensorSpec([], tf.string)
LINES = [",".join(str(i * j % 17) for j in range(4)) for i in range(50)]

WORDS = tf.lookup.StaticHashTable(
    tf.lookup.KeyValueTensorInitializer(LINES[:9], np.arange(9)), -1
)
OFFSETS = tf.constant(np.arange(200.0), tf.float32)
"""Too large for a constant in a graph."""


def numbers(line: Any) -> Any:
    values = tf.strings.to_number(tf.strings.split(line, ","))
    return tf.ensure_shape(values, [4])


def labelled(line: Any) -> Any:
    return {"x": numbers(line), "length": tf.strings.length(line)}, tf.size(line)


def lines(count: int = 50) -> Dataset:
    return tf.data.Dataset.from_tensor_slices(LINES[:count])


class Rank:
    """A rank's iterators over a dataset: over whole batches, and over parts."""

    def __init__(self, dataset: Dataset, rank: int, size: int) -> None:
        self.split = Split(rank, size)
        pipeline = divided(dataset, self.split)
        assert isinstance(pipeline, BatchPipeline), pipeline
        inputs = DividedInputs()
        self.divided = DividedPipeline(pipeline, self.split)
        self.whole = inputs.begin_pass(self.divided)
        fetch = TakenElement((), 0, (), ())
        resource = tf_datasets.resource_of(self.whole)
        self.parts: PartIterator
        (self.parts,) = inputs.of([fetch], [resource])


def arrays(batch: Any) -> list[Array]:
    return [np.asarray(tensor) for tensor in tf.nest.flatten(batch)]


def assert_divided(make: Make, size: int) -> None:
    """Each pass over the dataset is divided, and its parts are those of one process."""
    ranks = [Rank(make(), rank, size) for rank in range(size)]
    for batch in make():
        expected = arrays(batch)
        taken = [rank.parts.take() for rank in ranks]
        assert len({np.asarray(each.compared).tobytes() for each in taken}) == 1
        for place, whole in enumerate(expected):
            rows = len(whole)
            own = [each.values[place] for each in taken]
            if own[0].part is None:
                assert not ranks[0].divided.can_divide[rows]
                for value in own:
                    np.testing.assert_array_equal(value.tensor, whole)
                continue
            joined = np.concatenate([value.tensor for value in own])
            np.testing.assert_array_equal(joined, whole)
            for rank, value in zip(ranks, own, strict=True):
                assert value.tensor.shape[0] == rank.split.count(rows)
                assert value.shape == whole.shape
        if size > 2:  # Tracing this takes long.
            for computed, whole in zip(taken[0].whole(), expected, strict=True):
                np.testing.assert_array_equal(computed, whole)
    for rank in ranks:
        with pytest.raises(tf.errors.OutOfRangeError):
            rank.parts.take()


@pytest.mark.parametrize(("count", "size"), [(17, 2), (18, 3), (23, 5)])
def test_rows_of_full_and_of_smaller_last_batches(count: int, size: int) -> None:
    assert_divided(lambda: lines(count).map(labelled).batch(8), size)


PIPELINES: dict[str, Make] = {
    "in parallel": lambda: (
        lines().map(numbers, num_parallel_calls=2).batch(8, num_parallel_calls=2)
    ),
    "without remainder": lambda: lines().map(numbers).batch(8, drop_remainder=True),
    "shuffled": lambda: lines().shuffle(20, seed=4).map(labelled).batch(8).prefetch(2),
    "repeated": lambda: lines().shuffle(9, seed=1).map(numbers).repeat(2).batch(7),
    "repeated batches": lambda: lines(20).shuffle(9, 1).map(numbers).batch(7).repeat(2),
    "cut": lambda: lines().map(numbers).skip(3).take(30).batch(8).skip(1).take(2),
    "several functions": lambda: (
        lines().map(numbers).prefetch(1).map(tf.sort).repeat(2).map(tf.cumsum).batch(8)
    ),
    "of unknown length": lambda: (
        lines().filter(lambda line: tf.strings.length(line) > 8).map(numbers).batch(8)
    ),
    "of any shape": lambda: (
        lines()
        .map(lambda line: (tf.strings.split(line, ",")[: tf.strings.length(line)], 1))
        .filter(lambda words, one: tf.size(words) > 2)
        .cache()
        .map(lambda words, one: (tf.strings.to_number(words[:3]), tf.size(words)))
        .batch(8)
    ),
    "with seeds": lambda: (
        tf.data.Dataset.zip(lines(), tf.data.Dataset.random(seed=3))
        .map(lambda line, seed: numbers(line) + noise(seed))
        .batch(8)
    ),
    "with random numbers": lambda: (
        lines().map(image).prefetch(1).map(augmented).batch(8)
    ),
    "with random numbers at several places": lambda: (
        lines(20)
        .map(lambda line: augmented(image(line)))
        .skip(3)
        .repeat(2)
        .map(augmented_again)
        .batch(8)
    ),
    "with random numbers, and of any shape": lambda: (
        lines()
        .map(lambda line: tf.strings.split(line, ",")[: tf.strings.length(line)])
        .filter(lambda words: tf.size(words) > 2)
        .map(lambda words: noisy(tf.strings.to_number(words[:3])))
        .repeat(2)
        .map(augmented_again)
        .batch(8)
    ),
    "with random numbers, and what a map has captured": lambda: (
        lines().map(lambda line: numbered(line, augmented(image(line)))).batch(8)
    ),
    "shuffled after map": lambda: (
        lines().map(labelled).shuffle(20, seed=4).take(40).batch(8).prefetch(2)
    ),
    "shuffled once, repeated": lambda: (
        lines()
        .map(numbers)
        .shuffle(20, seed=4, reshuffle_each_iteration=False)
        .repeat(2)
        .shuffle(5, seed=1)
        .batch(7)
    ),
    "shuffled with random numbers": lambda: (
        lines()
        .map(lambda line: noisy(numbers(line)))
        .shuffle(9, seed=2)
        .map(augmented_again)
        .batch(8)
    ),
    "zipped": lambda: (
        tf.data.Dataset.zip(
            {
                "x": lines().map(numbers).prefetch(1).skip(2),
                "z": tf.data.Dataset.range(70),
                "y": lines().map(labelled).shuffle(9, seed=3),
            }
        )
        .map(lambda each: (each["x"] + float_of(each["z"]), each["y"]))
        .batch(8)
    ),
    "zipped with random numbers": lambda: (
        tf.data.Dataset.zip(
            lines().map(lambda line: noisy(numbers(line))).map(augmented_again),
            lines().map(lambda line: augmented(image(line))),
        )
        .shuffle(9, seed=2)
        .batch(8)
    ),
    "shuffled batches": lambda: (
        lines().map(labelled).batch(8).shuffle(4, seed=5).repeat(2)
    ),
    "functions of batches": lambda: (
        lines()
        .map(labelled)
        .batch(8, num_parallel_calls=2)
        .map(lambda x, size: (x["x"] / 9.0, tf.one_hot(size, 3)))
        .prefetch(1)
        .map(lambda x, y: (tf.where(x > 1.0, x, tf.sqrt(x)), y), num_parallel_calls=2)
        .shuffle(3, seed=1)
    ),
    "functions of batches alone": lambda: (
        lines()
        .batch(8)
        .map(lambda line: (WORDS.lookup(line) + 1, tf.strings.length(line)))
        .map(lambda number, length: (tf.gather(OFFSETS, number), length))
    ),
    "functions of batches of any shape": lambda: (
        lines()
        .map(lambda line: tf.strings.split(line, ",")[: tf.strings.length(line)])
        .filter(lambda words: tf.size(words) > 2)
        .map(lambda words: words[:3])
        .batch(8, drop_remainder=True)
        .map(tf.strings.to_number)
    ),
    "shuffled elements of a generator": lambda: (
        tf.data.Dataset.from_generator(lambda: iter(LINES), output_signature=LINE)
        .map(numbers)
        .shuffle(8, seed=1)
        .batch(8)
    ),
    "with tensors that hold nothing": lambda: (
        tf.data.Dataset.from_tensor_slices((LINES, np.zeros((50, 0), np.float32)))
        .map(lambda line, none: (tf.concat([numbers(line), none], 0), none))
        .batch(8)
    ),
    "counted": lambda: (
        lines()
        .map(numbers)
        .apply(tf.data.experimental.assert_cardinality(50))
        .batch(8)
        .with_options(tf.data.Options())
    ),
}


def float_of(number: Any) -> Any:
    return tf.cast(number, tf.float32)


def noise(seed: Any) -> Any:
    return tf.random.stateless_normal([4], tf.stack([seed, 1]))


def noisy(x: Any) -> Any:
    return x + tf.random.normal([], seed=3), tf.size(x)


def image(line: Any) -> Any:
    return tf.reshape(numbers(line), [2, 2, 1])


def augmented(pixels: Any) -> Any:
    pixels = tf.image.random_flip_left_right(pixels, seed=1)
    pixels = tf.image.random_crop(pixels, [1, 2, 1], seed=2)
    if tf.random.uniform([], seed=4) > 0.5:
        pixels = -pixels
    return noisy(pixels)


def numbered(line: Any, of_line: tuple[Any, Any]) -> Any:
    number = WORDS.lookup(line)
    return of_line[0] + OFFSETS[number], number, of_line[1]


def augmented_again(x: Any, size: Any) -> Any:
    return tf.image.random_brightness(x, 0.5, seed=5), size


@pytest.mark.parametrize("name", PIPELINES)
def test_stages_keep_their_order(name: str) -> None:
    assert_divided(PIPELINES[name], 2)


SHUFFLED: dict[str, Make] = {
    "before map": lambda: lines().shuffle(50, seed=2).map(numbers).batch(50),
    "after map": lambda: lines().map(numbers).shuffle(50, seed=2).batch(50),
    "after batch": lambda: lines().map(numbers).batch(1).shuffle(50, seed=2),
}


@pytest.mark.parametrize("place", SHUFFLED)
def test_all_passes_over_a_shuffled_dataset_share_one_sequence(place: str) -> None:
    one, own = SHUFFLED[place](), SHUFFLED[place]()
    first, second, third, fourth = (arrays(next(iter(one))) for _ in range(4))
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(arrays(next(iter(own))), first)
    rank = Rank(own, 0, 1)
    np.testing.assert_array_equal(arrays(next(rank.whole)), second)
    np.testing.assert_array_equal(arrays(next(iter(own.take(1)))), third)
    np.testing.assert_array_equal(arrays(next(Rank(own, 0, 1).whole)), fourth)


def test_the_programs_iterator_shares_its_place_with_that_over_parts() -> None:
    rank = Rank(lines().map(labelled).batch(8).prefetch(2), 1, 2)
    batches = [arrays(batch) for batch in lines().map(labelled).batch(8)]
    for place in (0, 2, 4):
        np.testing.assert_array_equal(arrays(next(rank.whole))[1], batches[place][1])
        taken = rank.parts.take().values
        np.testing.assert_array_equal(taken[1].tensor, batches[place + 1][1][4:])
    assert len(arrays(next(rank.whole))[0]) == 2
    with pytest.raises(StopIteration):
        next(rank.whole)


# --- what is compared -----------------------------------------------------------------


def compared(dataset: Dataset) -> list[bytes]:
    rank = Rank(dataset, 0, 2)
    return [np.asarray(rank.parts.take().compared).tobytes() for _ in range(2)]


def scaled(factor: Any) -> Dataset:
    return lines().map(lambda line: numbers(line) * factor).batch(8)


def looked_up(words: Sequence[str]) -> Dataset:
    initial = tf.lookup.KeyValueTensorInitializer(list(words), list(range(len(words))))
    table = tf.lookup.StaticHashTable(initial, -1)
    return lines().map(lambda line: (table.lookup(line), numbers(line))).batch(8)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(lambda: scaled(2.0), lambda: scaled(3.0), id="functions"),
        pytest.param(
            lambda: scaled(tf.constant(2.0)),
            lambda: scaled(tf.constant(3.0)),
            id="captured tensors",
        ),
        pytest.param(
            lambda: looked_up(LINES[:9]), lambda: looked_up(LINES[1:9]), id="tables"
        ),
        pytest.param(
            lambda: lines().map(numbers).batch(8),
            lambda: lines().skip(1).map(numbers).batch(8),
            id="elements",
        ),
    ],
)
def test_ranks_compare_all_that_their_batches_depend_on(one: Make, other: Make) -> None:
    first, second = compared(one())
    assert first != second
    assert compared(one()) == [first, second]
    assert not set(compared(other())) & {first, second}


def test_files_that_differ_show_in_the_first_batch(tmp_path: Path) -> None:
    path = tmp_path / "factor"

    def read(line: Any) -> Any:
        return numbers(line) * tf.strings.to_number(tf.io.read_file(str(path)))

    path.write_text("2")
    before = compared(lines().map(read).batch(8))
    path.write_text("3")
    after = compared(lines().map(read).batch(8))
    assert before[0] != after[0]
    assert before[1] == after[1]


def test_ranks_that_differ_continue_with_whole_batches() -> None:
    rank = Rank(lines().map(numbers).batch(8), 1, 2)
    batches = [arrays(batch) for batch in lines().map(numbers).batch(8)]
    whole = rank.parts.take().if_it_differs()
    np.testing.assert_array_equal(whole.values[0].tensor, batches[0][0])
    second = rank.parts.take()
    assert second.compared is None
    np.testing.assert_array_equal(second.values[0].tensor, batches[1][0])
    assert not rank.divided.is_divided
    np.testing.assert_array_equal(
        arrays(next(DividedInputs().begin_pass(rank.divided))), batches[0]
    )


def test_an_iterator_goes_on_after_an_error() -> None:
    texts = [*LINES[:10], "no number", *LINES[11:24]]
    dataset = tf.data.Dataset.from_tensor_slices(texts).map(numbers).batch(8)
    rank = Rank(dataset, 0, 2)
    expected = [arrays(batch)[0] for batch in lines(24).map(numbers).batch(8)]
    for batch in (expected[0], None, expected[2]):
        if batch is None:
            with pytest.raises(tf.errors.InvalidArgumentError, match="no number"):
                rank.parts.take()
            continue
        np.testing.assert_array_equal(rank.parts.take().values[0].tensor, batch[:4])


# --- what stays whole -----------------------------------------------------------------


def drawing_in_a_branch(line: Any) -> Any:
    if tf.strings.length(line) > 8:
        return numbers(line) + tf.random.normal([4])
    return numbers(line)


def drawing_as_many_as_there_are(line: Any) -> Any:
    noise = tf.random.normal(tf.shape(tf.strings.split(line, ",")))
    return numbers(line) + tf.ensure_shape(noise, [4])


def in_python(line: Any) -> Any:
    return tf.numpy_function(lambda text: len(text), [line], tf.int64)


def with_a_variable() -> Dataset:
    variable = tf.Variable(1.0)
    return lines().map(lambda line: numbers(line) * variable).batch(8)


def with_a_mutable_table() -> Dataset:
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    return lines().map(table.lookup).batch(8)


def in_any_order() -> Dataset:
    options = tf.data.Options()
    options.deterministic = False
    return lines().map(numbers).batch(8).with_options(options)


WHOLE: dict[str, Make] = {
    "state (RandomStandardNormal) in a branch": lambda: (
        lines().map(drawing_in_a_branch).batch(8)
    ),
    "(RandomStandardNormal) in a branch or a loop, or of a shape": lambda: (
        lines().map(drawing_as_many_as_there_are).batch(8)
    ),
    "calls Python": lambda: lines().map(in_python).batch(8),
    "a variable": with_a_variable,
    "a mutable table": with_a_mutable_table,
    "an effect or a state (PrintV2)": lambda: (
        lines().map(lambda line: (tf.print(line), numbers(line))[1]).batch(8)
    ),
    "options allow any order": in_any_order,
    "map() may change the order": lambda: (
        lines().map(numbers, num_parallel_calls=2, deterministic=False).batch(8)
    ),
    "batch() may change the order": lambda: (
        lines().map(numbers).batch(8, num_parallel_calls=2, deterministic=False)
    ),
    "filter(...) comes between": lambda: (
        lines().map(numbers).filter(lambda x: x[0] > 1.0).batch(8)
    ),
    "cache(...) comes between": lambda: lines().map(numbers).cache().batch(8),
    "ignoreerrors(...) comes after": lambda: (
        lines().map(numbers).batch(8).ignore_errors()
    ),
    "cache(...) comes after": lambda: lines().map(numbers).batch(8).cache(),
    "paddedbatch(...) returns depends on all rows": lambda: (
        lines().map(numbers).padded_batch(8)
    ),
    "that it returns depend on others": lambda: (
        lines().map(numbers).batch(8).map(lambda x: x - tf.reduce_mean(x, 0))
    ),
    "not all that it returns is divided": lambda: (
        lines().map(numbers).batch(8).map(lambda x: (x, tf.ones([8])))
    ),
    "it maps whole batches, and the function of map() draws": lambda: (
        lines().map(numbers).batch(8).map(lambda x: x + tf.random.normal([8, 4]))
    ),
    "does not call batch()": lambda: lines().map(numbers),
    "function of map() calls Python": lambda: (
        lines().map(in_python).map(lambda length: length + 1).batch(8)
    ),
    "fewer rows than there are ranks": lambda: lines().map(numbers).batch(2),
    "hold strings": lambda: lines().map(tf.strings.upper).batch(8),
    "dense tensors": lambda: (
        lines().map(lambda line: tf.strings.split([line])).batch(8)
    ),
    "keeps its state to itself": lambda: (
        lines()
        .apply(tf.data.experimental.shuffle_and_repeat(8, 2))
        .map(numbers)
        .batch(8)
    ),
    "too little": lambda: tf.data.Dataset.range(9).map(lambda x: x * 2).batch(8),
}


@pytest.mark.parametrize("reason", WHOLE)
def test_what_cannot_be_divided_says_why(reason: str) -> None:
    said = divided(WHOLE[reason](), Split(0, 3))
    assert isinstance(said, str)
    assert reason in said


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (SHUFFLED["after map"], "shuffle(...) comes after map()"),
        (SHUFFLED["after batch"], "shuffle(...) comes after batch()"),
    ],
)
def test_a_shuffle_of_much_data_in_memory_is_not_copied(
    make: Make, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(map(len, LINES))
    monkeypatch.setattr(tf_datasets, "_MOST_BYTES", size)
    assert isinstance(divided(make(), Split(0, 1)), BatchPipeline)
    monkeypatch.setattr(tf_datasets, "_MOST_BYTES", size - 1)
    assert f"{reason}: its data" in str(divided(make(), Split(0, 1)))


def test_functions_before_one_that_cannot_be_divided_are_computed_whole() -> None:
    count = itertools.count()

    def counted(line: Any) -> Any:
        tf.numpy_function(lambda: next(count), [], tf.int64)
        return line

    pipeline = divided(lines().map(counted).map(numbers).batch(8), Split(0, 2))
    assert isinstance(pipeline, BatchPipeline)
    assert len(pipeline.maps) == 1
