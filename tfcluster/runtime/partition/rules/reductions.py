"""Reductions along dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfcluster.runtime.partition.graph import Node
from tfcluster.runtime.partition.placement import SUM, Partial
from tfcluster.runtime.partition.rules.table import (
    LocalOps,
    LocalPlan,
    PlacedOp,
    Whole,
    require,
    rule,
)
from tfcluster.runtime.partition.writer import Ref


def _axes(op: PlacedOp, rank: int) -> list[int]:
    axes = op.constant(1)
    return sorted({int(axis) % rank for axis in np.atleast_1d(axes)}) if rank else []


@rule("Sum", "Mean", "Max", "Min", "Any", "All", "Prod", "EuclideanNorm")
def reduce(op: PlacedOp) -> LocalPlan:
    """A reduction over the rows is a term of the whole reduction."""
    shape = op.shape()
    if op.placements[0] == SUM:
        if op.type == "Sum" or (op.type == "Mean" and _is_wide_float(op)):
            return LocalPlan(op.want([0], SUM), [SUM])
        raise Whole
    shard = op.shard()
    axes = _axes(op, len(shape))
    want = op.want([0], shard)
    if shard.dim not in axes:
        dropped = 0 if op.attribute("keep_dims") else sum(a < shard.dim for a in axes)
        return LocalPlan(want, [shard.at(shard.dim - dropped)])
    require(not op.inputs[0].dtype.is_complex or op.type == "Sum")
    if op.type == "Sum":
        return LocalPlan(want, [SUM], _sum if _is_half(op) else None)
    if op.type == "Mean" and op.inputs[0].dtype.is_floating:
        return _mean(op, [shape[axis] for axis in axes])
    if op.type in ("Max", "Any"):
        return LocalPlan(want, [Partial("max")])
    if op.type in ("Min", "All"):
        return LocalPlan(want, [Partial("min")])
    raise Whole


def _mean(op: PlacedOp, sizes: Sequence[int | None]) -> LocalPlan:
    """The sum of a rank's rows, divided by the number of all rows."""
    shard = op.shard()
    if any(size is None for size in sizes):
        raise Whole
    count = math.prod(size or 0 for size in sizes)
    dtype = op.inputs[0].dtype

    def build(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
        total = _wide_sum(local, node, inputs)
        divisor = np.array(count, total.dtype.as_numpy_dtype)
        mean = local.op("RealDiv", [total, local.constant(divisor)])
        return mean if total.dtype == dtype else local.op("Cast", mean, DstT=dtype)

    return LocalPlan(op.want([0], shard), [SUM], build)


def _sum(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
    dtype = node.outputs[0].dtype
    return local.op("Cast", [_wide_sum(local, node, inputs)], DstT=dtype)


def _wide_sum(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Ref:
    """The sum in float32 at least, so that it neither overflows nor loses digits."""
    value, axes = inputs
    if value.dtype.is_floating and value.dtype.size < 4:
        value = local.op("Cast", [value], DstT=tf.float32)[0]
    return local.op("Sum", [value, axes], keep_dims=node.attribute("keep_dims"))[0]


def _is_half(op: PlacedOp) -> bool:
    return op.inputs[0].dtype.is_floating and op.inputs[0].dtype.size < 4


def _is_wide_float(op: PlacedOp) -> bool:
    return op.inputs[0].dtype.is_floating and op.inputs[0].dtype.size >= 4


@rule("ArgMax", "ArgMin")
def arg_max(op: PlacedOp) -> LocalPlan:
    shape, shard, axis = op.shape(), op.shard(), op.integer(1)
    axis %= len(shape)
    require(axis != shard.dim)
    return LocalPlan(op.want([0], shard), [shard.at(shard.dim - (axis < shard.dim))])


@rule("L2Loss")
def l2_loss(op: PlacedOp) -> LocalPlan:
    shard = op.shard()
    require(_is_wide_float(op))
    return LocalPlan([shard], [SUM])


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp")
def cumulate(op: PlacedOp) -> LocalPlan:
    shape, shard, axis = op.shape(), op.shard(), op.integer(1)
    require(axis % len(shape) != shard.dim)
    return op.alike([0])
