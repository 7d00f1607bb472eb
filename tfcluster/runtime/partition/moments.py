"""The mean and the variance of rows, in one exchange instead of two.

TensorFlow computes a variance from differences to the mean, for which ranks would have
to exchange the mean first. Here each rank computes the moments of its rows about their
own mean, and one exchange joins these. See T. Chan, G. Golub and R. LeVeque, "Updating
Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfcluster.runtime.partition.graph import (
    Node,
    OpGraph,
    Value,
    elements_of,
    sizes_of,
)
from tfcluster.runtime.partition.placement import REPLICATE, SUM, Placement, Shard
from tfcluster.runtime.partition.rules.table import LocalOps, LocalPlan
from tfcluster.runtime.partition.writer import Ref

_MOMENTS, _MEAN, _VARIANCE = "RowMoments", "MeanOfMoments", "VarianceOfMoments"
"""Types of nodes that are no ops of TensorFlow. The first has two outputs in float64:
the sums of the rows and of their squares."""
_COPIES = ("Identity", "StopGradient")


def join(graph: OpGraph, placements: dict[Value, Placement]) -> bool:
    """Compute means and variances of divided rows from moments; return if any is."""
    is_changed = False
    for node in list(graph.nodes):
        mean = _mean_of(node)
        if mean is None:
            continue
        rows, axes = mean.inputs
        placement = placements.get(rows)
        if isinstance(placement, Shard) and placement.dim in _axes(rows, axes):
            _use_moments(graph, mean, node)
            is_changed = True
    return is_changed


def _use_moments(graph: OpGraph, mean: Node, variance: Node) -> None:
    rows, axes = mean.inputs
    shape = [
        1 if axis in _axes(rows, axes) else size
        for axis, size in enumerate(rows.shape or ())
    ]
    node = Node(f"{mean.name}/moments", _MOMENTS, [rows, axes], mean.controls, {})
    node.origin, node.for_xla = mean.origin, mean.for_xla
    node.outputs = [Value(node, i, tf.float64, tuple(shape)) for i in range(2)]
    graph.nodes.insert(graph.nodes.index(mean), node)
    mean.type, mean.inputs = _MEAN, node.outputs[:1]
    variance.type, variance.inputs = _VARIANCE, list(node.outputs)


def _mean_of(variance: Node) -> Node | None:
    """The node of the mean to which a node takes mean squared differences."""
    if variance.type != "Mean":
        return None
    difference = variance.inputs[0].node
    if difference.type == "Square":
        difference = difference.inputs[0].node
        if difference.type != "Sub":
            return None
    elif difference.type != "SquaredDifference":
        return None
    for rows, other in (difference.inputs, difference.inputs[::-1]):
        mean = other.node
        while mean.type in _COPIES:
            mean = mean.inputs[0].node
        if mean.type == "Mean" and mean.inputs[0] is rows and _alike(mean, variance):
            return mean
    return None


def _alike(mean: Node, variance: Node) -> bool:
    """Whether both are means of the same entries, whose number is known."""
    rows, axes = mean.inputs
    shape, axes_of_variance = rows.shape, variance.inputs[1].constant
    if axes.constant is None or axes_of_variance is None or shape is None:
        return False
    own = _axes(rows, axes)
    return (
        own == _axes(rows, variance.inputs[1])
        and rows.dtype in (tf.float32, tf.float64)
        and elements_of(shape) is not None
        # The mean is broadcast to the rows of which it is the mean.
        and (bool(mean.attribute("keep_dims")) or own == list(range(len(own))))
    )


def _axes(rows: Value, axes: Value) -> list[int]:
    rank = len(rows.shape or ())
    assert axes.constant is not None
    return sorted({int(axis) % rank for axis in np.atleast_1d(axes.constant)})


# --- plans ----------------------------------------------------------------------------


def plan_of(node: Node, placements: Sequence[Placement]) -> LocalPlan | None:
    """The plan for one of the nodes that ``join`` has made; None for any other."""
    if node.type == _MOMENTS:
        shard = placements[0]
        if isinstance(shard, Shard) and shard.dim in _axes(*node.inputs):
            return LocalPlan([shard, REPLICATE], [SUM, SUM], _moments)
        return LocalPlan([REPLICATE] * 2, [REPLICATE] * 2, _moments)
    if node.type in (_MEAN, _VARIANCE):
        return LocalPlan([REPLICATE] * len(node.inputs), [REPLICATE], _from_moments)
    return None


def _moments(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
    """The sums of some rows and of their squares, from differences to a number.

    That is about their mean, so that the differences have all digits. It may be any
    number, so that it does not matter how the mean is rounded.
    """
    rows, axes = inputs[0], local.constant(np.array(_axes(*node.inputs), np.int32))
    sizes = local.op("Shape", [rows], out_type=tf.int32)[0]
    counted = local.op(
        "GatherV2", [sizes, axes, local.constant(np.array(0, np.int32))]
    )[0]
    product = local.op("Prod", [counted, local.constant(np.array([0], np.int32))])[0]
    count = local.op("Cast", [product], DstT=tf.float64)[0]
    mean = local.op("Mean", [rows, axes], keep_dims=True)[0]
    # It is not finite if the rows are not, and if there are none.
    is_finite, zeros = local.op("IsFinite", [mean])[0], local.op("ZerosLike", [mean])[0]
    number = local.op("SelectV2", [is_finite, mean, zeros])[0]
    differences = local.op("Sub", [rows, number])
    squares = local.op("Square", differences)
    pivot, first, second = (
        local.op("Cast", [ref], DstT=tf.float64)[0]
        for ref in (
            number,
            *local.op("Sum", [*differences, axes], keep_dims=True),
            *local.op("Sum", [*squares, axes], keep_dims=True),
        )
    )

    def plus(one: Ref, other: Ref) -> Ref:
        return local.op("AddV2", [one, other])[0]

    moved = local.op("Mul", [pivot, count])[0]
    # With differences d to p, the squares are those of d, and p (2 d + p).
    more = local.op("Mul", [pivot, plus(plus(first, first), moved)])[0]
    return plus(moved, first), plus(second, more)


def _from_moments(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
    """The mean, or the variance if the sum of the squares is given, too."""
    sizes = sizes_of(node.inputs[0].node.inputs[0].shape)
    assert sizes is not None
    count = math.prod(sizes) // math.prod(sizes_of(node.inputs[0].shape) or ())
    divisor = local.constant(np.array(count, np.float64))
    mean, *squares = (local.op("RealDiv", [term, divisor])[0] for term in inputs)
    if squares:
        square = local.op("Square", [mean])
        mean = local.op("Sub", [*squares, *square])[0]
        # Rounding may have left less than nothing.
        mean = local.op("Maximum", [mean, local.constant(np.array(0.0))])[0]
    (output,) = node.outputs
    shape = local.constant(np.array(sizes_of(output.shape), np.int32))
    return local.op("Cast", local.op("Reshape", [mean, shape]), DstT=output.dtype)
