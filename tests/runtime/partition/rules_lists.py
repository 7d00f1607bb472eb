"""Rules of ops on TensorLists, and what is known of lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings

from tests.runtime.partition.rule_checks import Array, Chance, ops_of, seeds
from tests.runtime.partition.simulated import Divided, divide
from tfcluster.runtime.partition.placement import REPLICATE, Placement, Shard
from tfcluster.runtime.partition.rules import lists

OPS = {
    *("TensorListReserve", "EmptyTensorList", "TensorListFromTensor"),
    *("TensorListSetItem", "TensorListPushBack", "TensorListGetItem"),
    *("TensorListPopBack", "TensorListStack", "TensorListLength"),
    *("TensorListElementShape", "TensorListResize"),
}
STEPS = 4
# Each takes longer than an example of a single op.
two = settings(max_examples=2, deadline=None)


def test_ops() -> None:
    assert ops_of(lists) == OPS


def _divided(
    function: Callable[..., Any], chance: Chance, *more: Array
) -> tuple[Divided, int]:
    """``function`` of rows of ``STEPS`` steps of 3 numbers, and of other numbers."""
    rows = chance.rows
    x = chance.numbers((rows, STEPS, 3), np.float64, -1, 1)
    placements: list[Placement] = [Shard(0, rows), *[REPLICATE] * len(more)]
    return divide(function, [x, *more], placements, chance.size, rows), rows


def _with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    def both(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([x, w])
            results = tf.nest.flatten(function(x, w))
            loss = tf.add_n([tf.reduce_sum(each * each) for each in results])
        gradients = tape.gradient(loss, [x, w])
        return [*results, *(tf.convert_to_tensor(g) for g in gradients)]

    return both


def _recurrent(x: Any, w: Any) -> Any:
    """A recurrent layer: one list of inputs, one of outputs."""
    inputs = tf.TensorArray(x.dtype, STEPS).unstack(tf.transpose(x, [1, 0, 2]))
    outputs = tf.TensorArray(x.dtype, STEPS)

    def body(t: Any, state: Any, outputs: Any) -> Any:
        state = tf.tanh(inputs.read(t) + state @ w)
        return t + 1, state, outputs.write(t, state)

    start = tf.zeros_like(x[:, 0])
    _, state, outputs = tf.while_loop(
        lambda t, *_: t < STEPS, body, (0, start, outputs)
    )
    return state, tf.transpose(outputs.stack(), [1, 0, 2])


def _scan(x: Any, w: Any) -> Any:
    return tf.scan(lambda a, b: a @ w + b, tf.transpose(x, [1, 0, 2]))


def _scan_backward(x: Any, w: Any) -> Any:
    return tf.scan(
        lambda a, b: a @ w + b,
        tf.transpose(x, [1, 0, 2]),
        initializer=tf.ones_like(x[:, 0]),
        reverse=True,
    )


def _map_over_steps(x: Any, w: Any) -> Any:
    return tf.map_fn(lambda each: tf.nn.relu(each @ w), tf.transpose(x, [1, 0, 2]))


def _map_over_rows(x: Any, w: Any) -> Any:
    return tf.map_fn(lambda row: tf.nn.softmax(row @ w), x)


def _fold(x: Any, w: Any) -> Any:
    return tf.foldl(lambda a, b: a * 0.5 + b @ w, tf.transpose(x, [1, 0, 2]))


def _statistics(x: Any, w: Any) -> Any:
    """A list of sums over rows, which are whole."""
    found = tf.TensorArray(x.dtype, STEPS)

    def body(t: Any, found: Any) -> Any:
        return t + 1, found.write(t, tf.reduce_mean(x[:, t] @ w, 0))

    return tf.while_loop(lambda t, _: t < STEPS, body, (0, found))[1].stack()


def _element_by_element(x: Any, w: Any) -> Any:
    found = tf.TensorArray(x.dtype, 3)
    for index in range(3):
        found = found.write(index, x[:, index] @ w)
    return found.stack() + 1.0, found.concat()


def _two_lists(x: Any, w: Any) -> Any:
    """One of rows, and one of numbers that are whole, in one loop."""
    first, second = (tf.TensorArray(x.dtype, STEPS) for _ in range(2))

    def body(t: Any, a: Any, b: Any) -> Any:
        part = x[:, t] @ w
        return t + 1, a.write(t, part), b.write(t, tf.reduce_sum(part, 0))

    _, first, second = tf.while_loop(lambda t, *_: t < STEPS, body, (0, first, second))
    return first.stack(), second.stack()


def _nested(x: Any, w: Any) -> Any:
    def outer(t: Any, found: Any) -> Any:
        def inner(k: Any, a: Any) -> Any:
            return k + 1, tf.tanh(a @ w)

        _, a = tf.while_loop(lambda k, _: k < t, inner, (0, x[:, t]))
        return t + 1, found.write(t, a)

    found = tf.TensorArray(x.dtype, STEPS)
    return tf.while_loop(lambda t, _: t < STEPS, outer, (0, found))[1].stack()


WITH_GRADIENTS = [
    *(_recurrent, _scan, _scan_backward, _map_over_steps, _map_over_rows, _fold),
    *(_statistics, _element_by_element, _two_lists, _nested),
]
DIVIDED = {_recurrent, _scan, _scan_backward, _map_over_steps, _fold, _two_lists}


@pytest.mark.parametrize("function", WITH_GRADIENTS, ids=lambda f: f.__name__[1:])
@given(seeds)
@two
def test_lists_of_a_loop_and_their_gradients(
    function: Callable[..., Any], seed: int
) -> None:
    chance = Chance(seed)
    w = chance.numbers((3, 3), np.float64, -1, 1)
    found, _ = _divided(_with_gradients(function), chance, w)
    found.assert_equal(1e-12)
    if function in DIVIDED:
        assert not found.computed_whole


@given(seeds)
@two
def test_a_recurrent_layer_needs_one_exchange(seed: int) -> None:
    chance = Chance(seed)
    w = chance.numbers((3, 3), np.float64, -1, 1)

    def function(x: Any, w: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(w)
            loss = tf.reduce_sum(_recurrent(x, w)[1])
        return loss, tape.gradient(loss, w)

    found, _ = _divided(function, chance, w)
    found.assert_equal(1e-12)
    assert found.written.exchanges == 1


def _elements_of_all_shapes(x: Any) -> Any:
    """Elements with more and more columns, added up over the loop."""

    def body(t: Any, found: Any) -> Any:
        return t + 1, found.write(t, x[:, : t + 1, 0])

    found = tf.TensorArray(x.dtype, STEPS, infer_shape=False, element_shape=None)
    _, found = tf.while_loop(lambda t, _: t < STEPS, body, (0, found))
    return [found.read(index) for index in range(STEPS)]


def _elements_of_all_shapes_by_hand(x: Any) -> Any:
    found = tf.raw_ops.EmptyTensorList(
        element_shape=-1, max_num_elements=-1, element_dtype=x.dtype
    )
    for index in range(3):
        element = x[:, : index + 1, 0]
        found = tf.raw_ops.TensorListPushBack(input_handle=found, tensor=element)
    results = []
    for _ in range(3):
        found, element = tf.raw_ops.TensorListPopBack(
            input_handle=found, element_shape=-1, element_dtype=x.dtype
        )
        results.append(element)
    return results


def _concatenated_elements(x: Any) -> Any:
    found = tf.TensorArray(x.dtype, STEPS, infer_shape=False)
    for index in range(STEPS):
        found = found.write(index, x[:, index, : 1 + index % 3])
    flat = tf.TensorArray(x.dtype, STEPS, infer_shape=False)
    for index in range(STEPS):
        flat = flat.write(index, tf.reshape(found.read(index), [-1]))
    return flat.concat()


def _rows_that_the_data_choose(x: Any) -> Any:
    """Elements whose sizes are known only when the loop runs."""
    found = tf.TensorArray(x.dtype, STEPS, infer_shape=False)

    def body(t: Any, found: Any) -> Any:
        return t + 1, found.write(t, tf.boolean_mask(x[:, t], x[:, t, 0] > 0))

    _, found = tf.while_loop(lambda t, _: t < STEPS, body, (0, found))
    return found.concat(), [found.read(index) for index in range(STEPS)]


def _grown(x: Any) -> Any:
    found = tf.TensorArray(x.dtype, 0, dynamic_size=True, clear_after_read=False)
    for index in range(3):
        found = found.write(index, x[:, index])
    return found.stack(), found.size(), found.gather([2, 0])


def _whole_and_divided(x: Any) -> Any:
    """Elements that come from the rows, and others that do not."""
    found = tf.TensorArray(x.dtype, 3)
    ones = tf.ones(x.shape[:1] + x.shape[2:], x.dtype)
    found = found.write(0, ones).write(1, x[:, 1]).write(2, ones * 2.0)
    return found.stack(), found.stack()[0]


def _divided_in_two_ways(x: Any) -> Any:
    """Elements with rows in different dimensions."""
    square = tf.matmul(x[:, 0], x[:, 1], transpose_b=True)
    found = tf.TensorArray(x.dtype, 3)
    found = found.write(0, square).write(1, tf.transpose(square)).write(2, square)
    return found.stack()


def _not_written(x: Any) -> Any:
    found = tf.TensorArray(x.dtype, 3, element_shape=x[:, 0].shape)
    found = found.write(1, x[:, 1])
    return found.read(0), found.stack()


def _without_elements(x: Any) -> Any:
    found = tf.TensorArray(x.dtype, 0, element_shape=[2, 3])
    return found.stack(), tf.map_fn(lambda each: each * 2.0, tf.transpose(x)[:, :0])


def _split_and_scattered(x: Any) -> Any:
    split = tf.TensorArray(x.dtype, 2).split(x[0], [1, STEPS - 1])
    scattered = tf.TensorArray(x.dtype, STEPS).scatter(
        [3, 1, 0, 2], tf.transpose(x, [1, 0, 2])
    )
    return split.read(1), scattered.stack(), scattered.concat()


def _lists_by_branch(x: Any) -> Any:
    """Elements are divided in one branch, and whole in the other."""
    ones = tf.ones(x.shape[:1] + x.shape[2:], x.dtype)
    total = tf.reduce_sum(x)

    def whole() -> Any:
        return tf.TensorArray(x.dtype, 2).unstack(tf.stack([ones, ones])).stack()

    def rows() -> Any:
        return tf.TensorArray(x.dtype, 2).unstack(tf.stack([x[:, 0], ones])).stack()

    given = tf.TensorArray(x.dtype, 2).write(0, ones)
    handles = tf.cond(
        total > 0,
        lambda: given.write(1, x[:, 1]).flow,
        lambda: given.write(1, ones).flow,
    )
    del handles
    list_of_rows = tf.raw_ops.TensorListFromTensor(
        tensor=tf.stack([x[:, 0], x[:, 1]]), element_shape=tf.constant(-1)
    )
    list_of_ones = tf.raw_ops.TensorListFromTensor(
        tensor=tf.stack([ones, ones]), element_shape=tf.constant(-1)
    )
    chosen = tf.cond(total > 0, lambda: list_of_rows, lambda: list_of_ones)
    stacked = tf.raw_ops.TensorListStack(
        input_handle=chosen, element_shape=tf.constant(-1), element_dtype=x.dtype
    )
    return tf.cond(total > 0, whole, rows), tf.cond(total < 0, whole, rows), stacked


def _lists_of_a_loop_by_branch(x: Any) -> Any:
    ones = tf.ones(x.shape[:1] + x.shape[2:], x.dtype)

    def body(t: Any, found: Any) -> Any:
        element = tf.cond(x[0, 0, 0] > 0, lambda: x[:, t], lambda: ones)
        return t + 1, found.write(t, element)

    found = tf.TensorArray(x.dtype, STEPS)
    return tf.while_loop(lambda t, _: t < STEPS, body, (0, found))[1].stack()


def _shapes_of_lists(x: Any) -> Any:
    found = tf.raw_ops.TensorListFromTensor(
        tensor=tf.transpose(x, [1, 0, 2]),
        element_shape=tf.constant(x[:, 0].shape.as_list()),
    )
    other = tf.raw_ops.TensorListReserve(
        element_shape=tf.raw_ops.TensorListElementShape(
            input_handle=found, shape_type=tf.int32
        ),
        num_elements=tf.raw_ops.TensorListLength(input_handle=found),
        element_dtype=x.dtype,
    )
    other = tf.raw_ops.TensorListSetItem(input_handle=other, index=1, item=x[:, 2])
    other = tf.raw_ops.TensorListResize(input_handle=other, size=2)
    return tf.raw_ops.TensorListStack(
        input_handle=other,
        element_shape=tf.constant(x[:, 0].shape.as_list()),
        element_dtype=x.dtype,
    )


FORMS = [
    *(_elements_of_all_shapes, _elements_of_all_shapes_by_hand),
    *(_concatenated_elements, _rows_that_the_data_choose, _grown),
    *(_whole_and_divided, _divided_in_two_ways, _not_written, _without_elements),
    *(_split_and_scattered, _lists_by_branch, _lists_of_a_loop_by_branch),
    _shapes_of_lists,
]


@pytest.mark.parametrize("function", FORMS, ids=lambda f: f.__name__[1:])
@given(seeds)
@two
def test_lists(function: Callable[..., Any], seed: int) -> None:
    found, _ = _divided(function, Chance(seed))
    found.assert_equal()
