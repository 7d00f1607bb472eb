"""Small functions that were once computed differently, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from tests.runtime.partition.installed import simulated_ranks
from tfcluster.runtime.partition import programs
from tfcluster.runtime.partition.functions import Function
from tfcluster.runtime.partition.specialise import specialise

Arrays = list[NDArray[Any]]
F = TypeVar("F", bound=Callable[..., Any])


def traced(function: F) -> F:
    return cast(F, tf.function(function))


def flat(found: Any) -> Arrays:
    return [np.asarray(each) for each in tf.nest.flatten(found)]


def assert_equal(make: Callable[[], Any], size: int = 2, *, strict: bool = True) -> int:
    """Check that ``make`` returns the same numbers when its functions are divided.

    Returns how many programs were divided.
    """
    tf.random.set_seed(3)
    alone = flat(make())
    tf.random.set_seed(3)
    with simulated_ranks(size, strict=strict) as hook:
        found = flat(make())
    assert len(found) == len(alone)
    for one, other in zip(alone, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
    return sum(program.is_divided for program in hook.programs)


def rows(count: int) -> tf.Tensor:
    return tf.reshape(tf.range(count * 2, dtype=tf.float32), (count, 2))


@traced
def mean_of_next(batches: Iterator[Any]) -> Any:
    return tf.reduce_mean(next(batches) ** 2)


def until_the_end(function: Callable[..., Any], *batches: Iterator[Any]) -> list[Any]:
    found = []
    try:
        while True:
            found.append(function(*batches))
    except tf.errors.OutOfRangeError:
        return found


def test_a_batch_with_fewer_rows_than_ranks() -> None:
    def run() -> Any:
        data = tf.data.Dataset.from_tensor_slices(rows(9)).batch(4)
        return until_the_end(mean_of_next, iter(data))

    assert assert_equal(run) == 1


def test_a_function_that_cannot_be_specialised_gets_the_batch_that_was_taken(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr(programs, "specialise", fails)

    @traced
    def of_both(first: Iterator[Any], second: Iterator[Any]) -> Any:
        return tf.reduce_sum(next(first)) - tf.reduce_sum(next(second) * next(second))

    def run() -> Any:
        batches = tf.data.Dataset.from_tensor_slices(rows(12)).batch(2)
        ragged = tf.data.Dataset.from_tensor_slices(
            tf.ragged.constant([[1.0], [2.0, 3.0], [], [5.0]])
        )
        seconds = ragged.map(lambda row: tf.reduce_sum(row))
        return until_the_end(of_both, iter(batches), iter(seconds))

    assert assert_equal(run, strict=False) == 0
    assert "of_both is computed whole: on purpose" in capfd.readouterr().err
    with pytest.raises(ValueError, match="on purpose"):
        assert_equal(run)


def test_elements_that_are_ragged_or_sparse_are_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("on purpose")

    monkeypatch.setattr(programs, "specialise", fails)

    @traced
    def total(batches: Iterator[Any]) -> Any:
        ragged, sparse = next(batches)
        return tf.reduce_sum(ragged), tf.sparse.reduce_sum(sparse)

    def run() -> Any:
        ragged = tf.ragged.constant([[1.0], [2.0, 3.0], [], [5.0]])
        data = tf.data.Dataset.from_tensor_slices((ragged, tf.sparse.eye(4)))
        return until_the_end(total, iter(data.batch(2)))

    assert_equal(run, strict=False)


def test_an_iterator_that_a_loop_takes_from_as_well() -> None:
    @traced
    def mixed(batches: Iterator[Any]) -> Any:
        total = tf.constant(0.0)
        for _ in tf.range(2):
            total += tf.reduce_sum(next(batches))
        return total * 100 + tf.reduce_sum(next(batches))

    def run() -> Any:
        data = tf.data.Dataset.from_tensor_slices(rows(12)).batch(2)
        return until_the_end(mixed, iter(data))

    assert_equal(run)


def test_random_numbers_go_on_after_the_end_of_the_data() -> None:
    @traced
    def noisy(batches: Iterator[Any]) -> Any:
        noise = tf.random.normal((4, 2))
        return tf.reduce_sum(next(batches) * noise)

    def run() -> Any:
        data = tf.data.Dataset.from_tensor_slices(rows(12)).batch(4)
        return [until_the_end(noisy, iter(data)) for _ in range(3)]

    assert assert_equal(run) == 1


def test_batches_of_a_matrix_of_sparse_elements() -> None:
    @traced
    def product(batches: Iterator[Any]) -> Any:
        matrix, x = next(batches)
        return tf.sparse.sparse_dense_matmul(matrix, x)

    def run() -> Any:
        data = tf.data.Dataset.from_tensors((tf.sparse.eye(6), rows(6)))
        return until_the_end(product, iter(data))

    assert_equal(run)


def test_a_variable_that_changes_after_a_branch_has_read_it() -> None:
    def run() -> Any:
        variable = tf.Variable([[1.0, 2.0], [3.0, 4.0]])

        @traced
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                if tf.reduce_mean(x) > 100.0:
                    y = tf.ones((tf.shape(x)[0], 2)) * variable[0]
                else:
                    y = x @ variable
            gradient = tf.convert_to_tensor(tape.gradient(y, variable))
            variable.assign_sub(gradient)
            return y, gradient

        return [step(rows(7)) for _ in range(3)], variable

    assert assert_equal(run) == 1


def test_a_gradient_that_cannot_be_specialised_gets_whole_tensors(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(function: Function, *args: Any) -> Any:
        if "__backward_" in function.name:
            raise ValueError("on purpose")
        return specialise(function, *args)

    monkeypatch.setattr(programs, "specialise", fails)

    def run() -> Any:
        variable = tf.Variable([[1.0, 2.0], [3.0, 4.0]])

        @traced
        def forward(x: Any) -> Any:
            return tf.tanh(tf.tanh(x @ variable) @ variable)

        with tf.GradientTape() as tape:
            y = tf.reduce_sum(forward(rows(7) / 10.0))
        return y, tape.gradient(y, variable)

    # Hidden outputs are parts only where a process has one rank.
    assert assert_equal(run, 1, strict=False) == 1
    assert "is computed whole: on purpose" in capfd.readouterr().err
