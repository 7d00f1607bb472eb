"""Specialised functions compute what the functions compute, and know their shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from tests.runtime.partition.installed import simulated_ranks
from tests.runtime.partition.simulated import MORE, SIZES
from tfcluster.runtime.partition.functions import all_nodes, parsed
from tfcluster.runtime.partition.graph import Node, OpGraph
from tfcluster.runtime.partition.shape_graph import Argument
from tfcluster.runtime.partition.specialise import specialise

Array = NDArray[Any]
ROWS = tf.TensorSpec([None, 3], tf.float32)


def _traced(function: Callable[..., Any], *specs: tf.TensorSpec) -> Any:
    return tf.function(function, autograph=False).get_concrete_function(*specs)


def _specialised(function: Callable[..., Any], rows: int) -> OpGraph:
    traced = _traced(function, ROWS)
    inputs = [tf.zeros((rows, 3)), *traced.captured_inputs]
    return specialise(
        parsed(traced.function_def), [Argument.of(each) for each in inputs]
    )


def test_shapes_are_known() -> None:
    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def inner(x: Any) -> Any:
        return tf.reshape(x, [tf.shape(x)[0] * 3])

    def function(x: Any) -> Any:
        flat = inner(inner(x)[:, tf.newaxis] + tf.zeros([1, 3]))
        looped = tf.while_loop(lambda t, a: t < 3, lambda t, a: (t + 1, a * x), (0, x))
        chosen = tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: x * 2.0)
        return flat, looped[1], chosen, tf.reshape(chosen, [-1])

    shapes = [value.shape for value in _specialised(function, 4).outputs]
    assert shapes == [(36,), (4, 3), (4, 3), (12,)]


def test_branches_are_in_one_order_whatever_that_of_the_attributes_is() -> None:
    """A map of a parsed message has another order in each process.

    Ranks that write down nodes in unlike orders would seem to differ.
    """

    def branches(x: Any) -> Any:
        return tf.cond(tf.reduce_sum(x) > 0, lambda: tf.exp(x), lambda: tf.sin(x))

    function = parsed(_traced(branches, ROWS).function_def)
    (name,) = (n for n, each in function.nodes.items() if "If" in each.definition.op)
    source = function.nodes[name]
    attributes = sorted(source.definition.attr.items())
    orders = []
    for attr in dict(attributes), dict(reversed(attributes)):
        definition: Any = SimpleNamespace(op=source.definition.op, attr=attr)
        nodes = {name: replace(source, definition=definition)}
        orders.append([each.op for each in all_nodes(replace(function, nodes=nodes))])
    assert orders[0] == orders[1]
    assert {"Exp", "Sin"} <= set(orders[0])


def test_a_shape_that_varies_in_a_loop_is_not_known() -> None:
    def function(x: Any) -> Any:
        return tf.while_loop(
            lambda t, a: t < 3,
            lambda t, a: (t + 1, tf.concat([a, x], 0)),
            (0, x),
            shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, 3])),
        )[1]

    assert _specialised(function, 4).outputs[0].shape == (None, 3)


def test_gradients_are_exchanged_in_the_order_of_the_backward_pass() -> None:
    first, last = tf.Variable(tf.ones([3, 300])), tf.Variable(tf.ones([300, 200]))
    scale = tf.Variable(1.0)
    variables = [first, last, scale]

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def step(x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(tf.tanh(x @ first) @ last) * scale)
        # Keras's optimizers do this, too.
        gradients = tape.gradient(loss, variables)
        passed = tf.raw_ops.IdentityN(input=gradients)
        for variable, gradient in zip(variables, passed, strict=True):
            variable.assign_sub(gradient)

    with simulated_ranks(2, call=True) as hook:
        step(tf.ones([4, 3]))
    (program,) = hook.programs
    assert program.written is not None
    shapes = [[value.shape for value in each] for each in program.written.exchanged]
    # A few bytes go with a larger tensor.
    assert shapes == [[(1, 1), (300, 200)], [(3, 300)]]


def test_branches_that_are_known_are_taken() -> None:
    def function(x: Any) -> Any:
        few = tf.cond(tf.shape(x)[0] < 5, lambda: x[:, 0], lambda: x[0])
        number = tf.switch_case(
            tf.shape(x)[0] - 3, [lambda: x * 1.0, lambda: x * 2.0, lambda: x * 3.0]
        )
        return few, number

    for rows in (3, 4, 6):
        graph = _specialised(function, rows)
        assert not any(node.bodies for node in graph.nodes)
        assert graph.outputs[0].shape == ((rows,) if rows < 5 else (3,))


def test_ops_of_branches_and_conditions_have_their_own_names() -> None:
    def function(x: Any) -> Any:
        chosen = tf.cond(
            x[0, 0] > 0, lambda: tf.random.normal([2]), lambda: tf.random.normal([2])
        )
        return chosen, tf.while_loop(
            lambda a: tf.random.uniform([]) < 0.5,
            lambda a: [a + tf.random.uniform([])],
            [1.0],
        )

    graph = _specialised(function, 4)
    draws = [n.origin for n in graph.all_nodes() if n.type.startswith("Random")]
    assert len(draws) == len(set(draws)) == 4


# --- effects, in their order ----------------------------------------------------------


def _assigned_in_a_loop() -> list[Array]:
    total, steps = tf.Variable(tf.zeros(3)), tf.Variable(0)

    @tf.function(input_signature=[ROWS])  # type: ignore[untyped-decorator]
    def function(x: Any) -> Any:
        for step in tf.range(3):
            before = total + 0.0
            total.assign(before * 0.5 + tf.reduce_mean(x, 0))
            total.assign_add(tf.cast(step, tf.float32) * tf.reduce_max(x, 0))
            steps.assign_add(1)
            if tf.reduce_sum(total) > 2.0:
                total.assign(tf.nn.relu(total) - 1.0)
                steps.assign_add(10)
            x = x + total
        return x, total * 2.0

    return _run(function, [total, steps])


def _read_between_assignments() -> list[Array]:
    table = tf.Variable(tf.reshape(tf.range(12.0), (4, 3)))
    count = tf.Variable([0, 0, 0, 0])

    @tf.function(input_signature=[ROWS])  # type: ignore[untyped-decorator]
    def function(x: Any) -> Any:
        rows = tf.cast(tf.abs(x[:, 0]), tf.int32) % 4
        first = tf.gather(table, rows)
        table.scatter_nd_add(rows[:, tf.newaxis], x)
        second = tf.gather(table, rows) - first
        table.assign(table / 2.0)
        count.assign_add(tf.math.bincount(rows, minlength=4))
        count[0].assign(7)
        return first, second, tf.gather(table, rows)

    return _run(function, [table, count])


def _nested_effects() -> list[Array]:
    total = tf.Variable(1.0)

    @tf.function  # type: ignore[untyped-decorator]
    def step(x: Any) -> Any:
        total.assign(total * 2.0 - tf.reduce_mean(x))
        return x * total

    @tf.function(input_signature=[ROWS])  # type: ignore[untyped-decorator]
    def function(x: Any) -> Any:
        n = 0
        while n < 3 and tf.reduce_max(tf.abs(x)) < 50.0:
            if total > 0.5:
                x = step(x)
            else:
                total.assign_add(1.0)
                x = step(step(x))
            n += 1
        return x, n

    return _run(function, [total])


def _waits_with_a_constant() -> list[Array]:
    """TensorFlow lets the constant 1 wait, and thereby what adds it."""
    count = tf.Variable(0.0)
    seen: list[Array] = []

    def look(x: Array) -> Array:
        seen.append(np.asarray(count.numpy()))
        return x

    @tf.function(input_signature=[ROWS])  # type: ignore[untyped-decorator]
    def function(x: Any) -> Any:
        looked = tf.numpy_function(look, [tf.reduce_sum(x)], tf.float32)
        with tf.control_dependencies([looked]):
            count.assign_add(1.0)
        return tf.reduce_mean(x)

    return [*_run(function, [count]), *seen]


def test_loops_over_datasets_wait_for_each_other() -> None:
    total = tf.Variable(0.0)
    data = tf.data.Dataset.from_tensor_slices(np.ones((6, 3), np.float32)).batch(2)

    @tf.function(input_signature=[ROWS])  # type: ignore[untyped-decorator]
    def function(x: Any) -> Any:
        for batch in data:
            total.assign_add(tf.reduce_sum(batch))
        found = 0.0
        for _ in data:
            found += total
        return found + tf.reduce_sum(x)

    traced = function.get_concrete_function()
    inputs = [tf.zeros((4, 3)), *traced.captured_inputs]
    graph = specialise(
        parsed(traced.function_def), [Argument.of(each) for each in inputs]
    )
    writes, reads = (node for node in graph.nodes if node.type == "While")
    assert writes in _before(reads)


def _before(node: Node) -> set[Node]:
    """All nodes that a node waits for."""
    found, todo = set[Node](), [node]
    while todo:
        one = todo.pop()
        for each in (*one.controls, *(value.node for value in one.inputs)):
            if each not in found:
                found.add(each)
                todo.append(each)
    return found


def _run(function: Any, variables: list[Any]) -> list[Array]:
    generator = np.random.default_rng(0)
    found = []
    for rows in (7, 5, 6):
        x = generator.integers(-8, 8, (rows, 3)).astype("float32") / 4.0
        found += [np.asarray(each) for each in tf.nest.flatten(function(x))]
        found += [each.numpy() for each in variables]
    return [np.asarray(each) for each in found]


@pytest.mark.parametrize(
    "script",
    [
        _assigned_in_a_loop,
        _read_between_assignments,
        _nested_effects,
        _waits_with_a_constant,
    ],
)
@pytest.mark.parametrize("size", SIZES if MORE > 1 else (1, 3))
def test_effects_come_in_order(script: Callable[[], list[Array]], size: int) -> None:
    expected = script()
    with simulated_ranks(size) as hook:
        found = script()
    assert hook.programs
    assert size == 1 or any(each.is_divided for each in hook.programs)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-5)
