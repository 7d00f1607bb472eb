"""Tests of what ``tfcluster explain`` finds out about functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.runtime.partition.installed import simulated_ranks
from tfcluster.runtime.partition import explain
from tfcluster.runtime.partition.costs import cost_of, rounds_of
from tfcluster.runtime.partition.explain import (
    FunctionReport,
    explained,
    mostly_whole,
)
from tfcluster.runtime.partition.functions import parsed
from tfcluster.runtime.partition.graph import OpGraph
from tfcluster.runtime.partition.programs import RankProgram
from tfcluster.runtime.partition.rules.all import RULES
from tfcluster.runtime.partition.shape_graph import Argument
from tfcluster.runtime.partition.specialise import specialise
from tfcluster.runtime.partition.whole_work import WholeWork

ROWS = 12


TRACED: list[Any] = []
"""TensorFlow forgets the lines of a function with the function."""


def program_of(function: Callable[..., Any], *arguments: Any) -> RankProgram:
    """The program of a function on two ranks, after it has run."""
    tensors = [tf.convert_to_tensor(each) for each in arguments]
    TRACED.append(tf.function(function))
    with simulated_ranks(2) as hook:
        TRACED[-1](*tensors)
    return hook.programs[-1]


def explanation(function: Callable[..., Any], *arguments: Any) -> FunctionReport:
    return explained(program_of(function, *arguments))


def rows(*sizes: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).random((ROWS, *sizes)).astype("float32")


def line_with(function: Callable[..., Any], text: str, name: str = "") -> str:
    """``FILE:LINE:FUNCTION`` of the line of a function that contains ``text``."""
    source, first = inspect.getsourcelines(function)
    (offset,) = [i for i, line in enumerate(source) if text in line]
    return f":{first + offset}:{name or function.__name__}"


# --- costs ----------------------------------------------------------------------------


def graph_of(function: Callable[..., Any], shapes: Sequence[Sequence[int]]) -> OpGraph:
    specs = [tf.TensorSpec(shape, tf.float32) for shape in shapes]
    traced = tf.function(function).get_concrete_function(*specs)
    arguments = [Argument(tf.float32, tuple(shape)) for shape in shapes]
    return specialise(parsed(traced.function_def), arguments)


def costs(function: Callable[..., Any], *shapes: Sequence[int]) -> dict[str, int]:
    return {
        node.type: cost_of(node)
        for node in graph_of(function, shapes).nodes
        if cost_of(node)
    }


def convolution(**options: Any) -> Callable[..., Any]:
    given = {"strides": 1, "padding": "SAME", **options}
    return lambda images, kernel: tf.nn.conv2d(images, kernel, **given)


IMAGES, KERNEL = (4, 8, 8, 3), (5, 5, 3, 16)
OF_CONVOLUTION = 4 * 8 * 8 * 16 * 5 * 5 * 3


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (tf.matmul, [(4, 5), (5, 6)], {"MatMul": 4 * 5 * 6}),
        (
            lambda a, b: tf.matmul(a, b, transpose_a=True),
            [(5, 4), (5, 6)],
            {"MatMul": 4 * 5 * 6},
        ),
        (tf.matmul, [(2, 4, 5), (2, 5, 6)], {"BatchMatMulV2": 2 * 4 * 5 * 6}),
        (
            lambda a, b: tf.raw_ops.Einsum(inputs=[a, b], equation="ij,kj->ki"),
            [(4, 5), (6, 5)],
            {"Einsum": 4 * 5 * 6},
        ),
        (convolution(), [IMAGES, KERNEL], {"Conv2D": OF_CONVOLUTION}),
        (
            convolution(strides=2),
            [IMAGES, KERNEL],
            {"Conv2D": OF_CONVOLUTION // 4},
        ),
        (
            lambda a, b: tf.nn.depthwise_conv2d(a, b, [1, 1, 1, 1], "SAME"),
            [IMAGES, (5, 5, 3, 2)],
            {"DepthwiseConv2dNative": 4 * 8 * 8 * 6 * 5 * 5},
        ),
        (lambda a: tf.reduce_sum(a, 1), [(4, 5)], {"Sum": 20}),
        (lambda a: tf.broadcast_to(a, (3, 4, 5)), [(4, 5)], {"BroadcastTo": 60}),
        (lambda a: tf.reshape(tf.identity(a), (5, 4)), [(4, 5)], {}),
    ],
)
def test_the_cost_of_an_op(
    function: Callable[..., Any],
    shapes: Sequence[Sequence[int]],
    expected: dict[str, int],
) -> None:
    assert costs(function, *shapes) == expected


def test_the_gradients_of_a_convolution_cost_as_much_as_itself() -> None:
    def gradients(images: Any, kernel: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([images, kernel])
            made = convolution()(images, kernel)
        return tape.gradient(made, [images, kernel])

    found = costs(gradients, IMAGES, KERNEL)
    for name in ("Conv2DBackpropInput", "Conv2DBackpropFilter"):
        assert found[name] == OF_CONVOLUTION


def test_the_rounds_of_a_loop() -> None:
    def read(items: Any) -> Any:
        array = tf.TensorArray(tf.float32, 7).unstack(items)
        return tf.while_loop(
            lambda i, total: i < 7,
            lambda i, total: (i + 1, total + array.read(i)),
            (0, tf.zeros(3)),
        )

    def limited(items: Any) -> Any:
        return tf.while_loop(
            lambda total: tf.reduce_sum(total) < 9,
            lambda total: (total + items,),
            (items,),
            maximum_iterations=5,
        )

    def unlimited(items: Any) -> Any:
        return tf.while_loop(
            lambda total: tf.reduce_sum(total) < 9,
            lambda total: (total + items,),
            (items,),
        )

    for function, expected in ((read, 7), (limited, 5), (unlimited, 1)):
        nodes = graph_of(function, [(7, 3)]).nodes
        (loop,) = [node for node in nodes if node.bodies]
        assert rounds_of(loop) == expected


# --- functions ------------------------------------------------------------------------


def test_divided_work_and_sums() -> None:
    weights = tf.Variable(tf.ones((8, 4)))

    def step(batch: Any) -> Any:
        return tf.reduce_sum(tf.matmul(batch, weights), 0)

    found = explanation(step, rows(8))
    assert (found.name, found.rows, found.share) == ("step", ROWS, 1.0)
    assert found.cost == ROWS * 8 * 4 + ROWS * 4
    assert (found.exchanges, found.exchanged_bytes) == (1, 4 * 4)
    (terms,) = found.exchanged
    assert (terms.kind, terms.name, terms.wanted_by) == ("sum", "Sum", "result")
    assert terms.line is not None
    assert terms.line.endswith(line_with(step, "reduce_sum"))
    assert not found.whole


def test_a_gather_has_the_line_that_needs_the_rows() -> None:
    def ordered(batch: Any) -> Any:
        doubled = batch * 2
        best = tf.sort(doubled, axis=0)
        return best[0]

    found = explanation(ordered, rows(8))
    (gather,) = found.exchanged
    assert (gather.kind, gather.bytes) == ("rows", ROWS * 8 * 4)
    where = line_with(ordered, "tf.sort")
    assert gather.line is not None
    assert gather.line.endswith(where)
    (op,) = found.whole
    assert (op.op, op.reason) == ("TopKV2", explain.OTHER_USE)
    assert op.line is not None
    assert op.line.endswith(where)


def test_a_gather_has_not_the_line_that_made_the_rows() -> None:
    def seen(batch: Any) -> Any:
        doubled = batch * 2
        tf.numpy_function(lambda values: values, [doubled], tf.float32)
        return tf.reduce_sum(doubled)

    gather = explanation(seen, rows(8)).exchanged[0]
    assert (gather.kind, gather.wanted_by) == ("rows", "PyFunc")
    assert gather.line is not None
    assert gather.line.endswith(line_with(seen, "numpy_function"))


def test_lines_of_code_that_autograph_has_changed_and_of_inner_functions() -> None:
    def ordered(batch: Any) -> Any:
        if tf.reduce_sum(batch) > 0:
            batch = tf.sort(batch, axis=0)
        return batch

    inner = tf.function(ordered)

    def loop(batch: Any) -> Any:
        for _ in tf.range(3):
            batch = inner(batch) + tf.reverse(batch, [0])
        return batch

    found = explanation(loop, rows(8))
    lines = {each.op: each.line for each in found.whole}
    first, second = lines["TopKV2"], lines["ReverseV2"]
    assert first is not None
    assert first.endswith(line_with(ordered, "tf.sort"))
    assert second is not None
    assert second.endswith(line_with(loop, "tf.reverse"))


def test_work_that_follows_from_an_op_counts_for_it() -> None:
    weights = tf.Variable(tf.ones((8, 400)))

    def same(values: Any) -> Any:
        return values

    def step(batch: Any) -> Any:
        seen = tf.numpy_function(same, [batch], tf.float32)
        seen = tf.ensure_shape(seen, (ROWS, 8))
        return tf.matmul(seen, weights)

    found = explanation(step, rows(8))
    (op,) = found.whole
    assert (op.op, op.cost, op.following_cost) == ("PyFunc", ROWS * 8, ROWS * 8 * 400)
    assert "on the host" in op.reason
    assert found.divided == 0


def test_a_loop_counts_all_its_rounds() -> None:
    def steps(batch: Any) -> Any:
        return tf.scan(
            lambda total, each: total + tf.sort(each, axis=0), tf.transpose(batch)
        )

    found = explanation(steps, rows(8))
    assert found.cost > 7 * ROWS


def test_exchanges_of_the_shorter_branch_do_not_count() -> None:
    def step(batch: Any) -> Any:
        total = tf.reduce_sum(batch)
        return tf.cond(
            total > 0,
            lambda: tf.reduce_sum(batch * 2) + tf.reduce_max(batch) * 3,
            lambda: tf.reduce_min(batch),
        )

    found = explanation(step, rows(8))
    assert (found.exchanges, found.exchanged_bytes) == (2, 3 * 4)


def test_ops_without_rule_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, "Sin")
    found = explanation(lambda batch: tf.sin(batch), rows(8))
    assert [(each.op, each.reason) for each in found.whole] == [
        ("Sin", explain.NO_RULE)
    ]


def test_a_function_that_cannot_be_divided_says_why() -> None:
    error = NotImplementedError("no way\nat all")
    found = explained(RankProgram("f", "f", error=error))
    assert found.error == "NotImplementedError: no way"
    assert found.share == 0


# --- the sentence ---------------------------------------------------------------------


def heavy(batch: Any) -> Any:
    whole = tf.sort(batch, axis=0)
    whole = tf.sort(whole, axis=0)
    for _ in range(10):
        whole = tf.matmul(whole, tf.ones((200, 200)))
    return whole


def test_mostly_whole_names_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    program = program_of(heavy, rows(200))
    found = mostly_whole([program])
    assert found is not None
    assert "of the work of heavy whole: TopKV2 in " in found
    first = line_with(heavy, "tf.sort(batch")
    assert f"{first} is not divided ({explain.OTHER_USE})" in found
    assert "\n" not in found
    monkeypatch.setattr(explain, "MOST_WHOLE_COST", 10**9)
    assert mostly_whole([program]) is None


def test_ranks_warn_once_of_each_function() -> None:
    said: list[str] = []
    judge = WholeWork(said.append)
    program = program_of(heavy, rows(200))
    for _ in range(3):
        judge.ran(program)
    assert said == [mostly_whole([program])]


def test_nothing_is_said_of_divided_work() -> None:
    def light(batch: Any) -> Any:
        return heavy(tf.matmul(batch, tf.ones((3000, 200))))

    def without_batch(matrix: Any) -> Any:
        return tf.matmul(tf.ones((200, 200)), tf.ones((200, 200))) + matrix

    assert mostly_whole([program_of(without_batch, np.float32(1))]) is None
    assert mostly_whole([]) is None
    assert mostly_whole([program_of(light, rows(3000))]) is None
