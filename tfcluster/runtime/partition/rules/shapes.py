"""Ops that change a tensor's shape, or put tensors together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfcluster.runtime.partition.graph import Node
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    SUM,
    Partial,
    Placement,
    Shard,
)
from tfcluster.runtime.partition.rules.table import (
    Build,
    LocalOps,
    LocalPlan,
    PlacedOp,
    Whole,
    known,
    require,
    rule,
)
from tfcluster.runtime.partition.writer import Ref


@rule("Reshape")
def reshape(op: PlacedOp) -> LocalPlan:
    want, target = op.want([0], op.placements[0]), _reshaped(op)
    if isinstance(target, Partial):
        return LocalPlan(want, [target])
    return LocalPlan(want, [target], _with_shape(1, op.output_sizes(), target))


@rule("Squeeze", "ExpandDims")
def squeeze(op: PlacedOp) -> LocalPlan:
    want, target = op.want([0], op.placements[0]), _reshaped(op)
    if isinstance(target, Partial):
        return LocalPlan(want, [target])
    sizes = op.output_sizes()

    def build(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
        own = np.array(local.split.local_shape(sizes, target), np.int32)
        return local.op("Reshape", [inputs[0], local.constant(own)])

    return LocalPlan(want, [target], build)


def _reshaped(op: PlacedOp) -> Shard | Partial:
    placement = op.placements[0]
    if isinstance(placement, Partial):
        return placement
    return known(op.shard().reshaped(op.sizes(), op.output_sizes()))


def _with_shape(index: int, whole: Sequence[int], target: Shard) -> Build:
    """The op with the shape of the rank's part as input ``index``."""

    def build(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
        own = local.split.local_shape(whole, target)
        own_inputs = list(inputs)
        dtype = node.inputs[index].dtype.as_numpy_dtype
        own_inputs[index] = local.constant(np.array(own, dtype))
        return local.repeat(node, own_inputs)

    return build


@rule("Transpose", "ConjugateTranspose", linear=0)
def transpose(op: PlacedOp) -> LocalPlan:
    shard, order = op.shard(), op.constant(1)
    return LocalPlan(op.want([0], shard), [shard.at(list(order).index(shard.dim))])


@rule("Concat", "ConcatV2")
def concat(op: PlacedOp) -> LocalPlan:
    """Rows of several tensors in one dimension become several blocks of rows.

    Batches of several sizes are put together by every rank, and become one batch.
    """
    axis_input = len(op.inputs) - 1 if op.type == "ConcatV2" else 0
    data = [i for i in range(len(op.inputs)) if i != axis_input]
    axis, output = op.integer(axis_input), op.output_shape()
    axis %= len(output)
    if all(op.placements[i] == SUM for i in data):
        return LocalPlan(op.want(data, SUM), [SUM])
    shard = op.first_shard(data)
    if shard.dim != axis:
        return LocalPlan(op.want(data, shard), [shard])
    want: list[Placement] = [REPLICATE] * len(op.inputs)
    blocks = 0
    for index in data:
        size = known(op.shape(index)[axis])
        if size % shard.block:
            require(axis == 0)
            joined = Shard(0, known(output[0]))
            return LocalPlan(op.want([], REPLICATE), [joined], built=[REPLICATE])
        if size == 0:
            continue
        want[index] = shard.with_outer(size // shard.block)
        blocks += size // shard.block
    return LocalPlan(want, [shard.with_outer(blocks)])


@rule("Split", "SplitV")
def split(op: PlacedOp) -> LocalPlan:
    """Along the rows, whole blocks of rows can be taken apart."""
    value, axis_input = (1, 0) if op.type == "Split" else (0, 2)
    axis, shape = op.integer(axis_input), op.shape(value)
    count = len(op.outputs)
    if op.placements[value] == SUM:
        return LocalPlan(op.want([value], SUM), [SUM] * count)
    shard = op.shard(value)
    want = op.want([value], shard)
    if axis % len(shape) != shard.dim:
        return LocalPlan(want, [shard] * count)
    sizes = [op.output_shape(index)[shard.dim] or 0 for index in range(count)]
    require(not any(size == 0 or size % shard.block for size in sizes))
    blocks = [size // shard.block for size in sizes]
    outputs = [shard.with_outer(number) for number in blocks]
    return LocalPlan(want, outputs, None if op.type == "Split" else _of_blocks(outputs))


def _of_blocks(outputs: Sequence[Shard]) -> Build:
    """``SplitV`` with the sizes of a rank's parts."""

    def build(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
        dtype = node.inputs[1].dtype.as_numpy_dtype
        own = np.array([local.split.local_size(shard) for shard in outputs], dtype)
        return local.repeat(node, [inputs[0], local.constant(own), inputs[2]])

    return build


@rule("Pack")
def pack(op: PlacedOp) -> LocalPlan:
    if all(placement == SUM for placement in op.placements):
        return LocalPlan(list(op.placements), [SUM])
    shard, output = op.first_shard(), op.output_shape()
    axis = op.attribute("axis") % len(output)
    target = shard.at(shard.dim + (axis <= shard.dim))
    return LocalPlan([shard] * len(op.inputs), [target])


@rule("Unpack", linear=0)
def unpack(op: PlacedOp) -> LocalPlan:
    shape, shard = op.shape(), op.shard()
    axis = op.attribute("axis") % len(shape)
    require(axis != shard.dim)
    target = shard.at(shard.dim - (axis < shard.dim))
    return LocalPlan([shard], [target] * len(op.outputs))


@rule("Tile", linear=0)
def tile(op: PlacedOp) -> LocalPlan:
    """Tiles of rows are blocks of rows."""
    shard, multiples = op.shard(), op.constant(1)
    count = int(multiples[shard.dim])
    require(count != 0)
    return LocalPlan(op.want([0], shard), [shard.with_outer(shard.outer * count)])


@rule("BroadcastTo")
def broadcast_to(op: PlacedOp) -> LocalPlan:
    shape, output = op.shape(), op.output_sizes()
    if op.placements[0] == SUM and op.elements() == op.outputs[0].elements:
        return LocalPlan([SUM, REPLICATE], [SUM])
    shard = op.shard()
    target = shard.at(shard.dim + len(output) - len(shape))
    require(output[target.dim] == shard.size)
    return LocalPlan(op.want([0], shard), [target], _with_shape(1, output, target))


@rule("ReverseV2", "Roll", linear=0)
def reverse(op: PlacedOp) -> LocalPlan:
    axes_input = 1 if op.type == "ReverseV2" else 2
    shape, shard, axes = op.shape(), op.shard(), op.constant(axes_input)
    require(shard.dim not in {int(axis) % len(shape) for axis in np.atleast_1d(axes)})
    return op.alike([0])


@rule("Pad", linear=0)
@rule("PadV2", "MirrorPad", "MirrorPadGrad")
def pad(op: PlacedOp) -> LocalPlan:
    """Along the rows, only whole blocks of zeros can be added."""
    widths, shard = op.constant(1), op.shard()
    before, after = (int(width) for width in widths[shard.dim])
    block = shard.block
    if before or after:
        is_mirror = op.type.startswith("Mirror")
        require(not is_mirror and before % block == 0 and after % block == 0)
    target = shard.with_outer(shard.outer + (before + after) // block)

    def build(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
        own = np.array(widths)
        part = local.split.local_block(shard)
        own[shard.dim] = before // block * part, after // block * part
        return local.repeat(node, [inputs[0], local.constant(own), *inputs[2:]])

    return LocalPlan(op.want([0], shard), [target], build)


@rule("SpaceToBatchND", "BatchToSpaceND", linear=0)
def blocks_to_rows(op: PlacedOp) -> LocalPlan:
    """Space goes into the outermost part of the rows' dimension, and back."""
    shard, block = op.shard(), op.constant(1)
    require(shard.dim == 0)
    count = int(np.prod(block))
    if op.type == "SpaceToBatchND":
        return LocalPlan(op.want([0], shard), [shard.with_outer(shard.outer * count)])
    require(shard.outer % count == 0)
    return LocalPlan(op.want([0], shard), [shard.with_outer(shard.outer // count)])


@rule("Fill", linear=1)
def fill(op: PlacedOp) -> LocalPlan:
    """Only a sum's term fills a term."""
    raise Whole
