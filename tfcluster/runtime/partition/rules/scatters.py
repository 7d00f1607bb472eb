"""Ops that put parts into a tensor: scatters into values, segments of sorted rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfcluster.runtime.partition.graph import Node
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    SUM,
    Partial,
    Shard,
    Split,
)
from tfcluster.runtime.partition.rules.table import (
    LocalOps,
    LocalPlan,
    PlacedOp,
    Whole,
    require,
    rule,
)
from tfcluster.runtime.partition.writer import Ref


@rule(
    *("TensorScatterAdd", "TensorScatterSub", "TensorScatterUpdate"),
    *("TensorScatterMax", "TensorScatterMin"),
)
def tensor_scatter(op: PlacedOp) -> LocalPlan:
    """Divided are the parts that an index names, or the indices."""
    slices = _slices(op)
    if slices is not None:
        return slices
    require(_has_numbers(op))
    is_linear = op.type in ("TensorScatterAdd", "TensorScatterSub")
    terms = {op.placements[0], op.placements[2]}
    if is_linear and op.placements[1] == REPLICATE and terms <= {SUM, REPLICATE}:
        require(SUM in terms)
        return LocalPlan([SUM, REPLICATE, SUM], [SUM])
    shard = op.first_shard([1, 2])
    if shard.dim >= len(op.shape(1)) - 1 or isinstance(op.placements[0], Shard):
        raise Whole
    if is_linear:
        return op.added_up([SUM, shard, shard], SUM)
    require(op.type != "TensorScatterUpdate")
    kind = op.type.removeprefix("TensorScatter").lower()
    return op.added_up([REPLICATE, shard, shard], Partial(kind))


def _slices(op: PlacedOp) -> LocalPlan | None:
    """Each rank has its part of each slice that is written."""
    tensor, indices, updates = (value.shape for value in op.inputs)
    if tensor is None or updates is None or not indices or indices[-1] is None:
        return None
    before, depth = len(indices) - 1, indices[-1]
    shard, of_updates = op.placements[0], op.placements[2]
    if not isinstance(shard, Shard):
        if not isinstance(of_updates, Shard) or of_updates.dim < before:
            return None
        shard = of_updates.at(of_updates.dim - before + depth)
    if shard.dim < depth or tensor[shard.dim] != shard.size:
        return None
    return LocalPlan([shard, REPLICATE, shard.at(shard.dim - depth + before)], [shard])


def _has_numbers(op: PlacedOp) -> bool:
    dtype = op.outputs[0].dtype
    return bool(dtype.is_floating or dtype.is_integer)


@rule("XlaDynamicUpdateSlice")
def dynamic_update(op: PlacedOp) -> LocalPlan:
    """The update has all rows; where it begins is then 0, whatever is given."""
    tensor, update = op.shape(0), op.shape(1)
    shard = op.first_shard([0, 1])
    require(tensor[shard.dim] == shard.size and update[shard.dim] == shard.size)
    return LocalPlan([shard, shard, REPLICATE], [shard])


@rule("SegmentSum", "SegmentMean", "SegmentProd", "SegmentMax", "SegmentMin")
def segments(op: PlacedOp) -> LocalPlan:
    """Divided are the segments' dimensions, or what is added.

    A rank does not have the last segment, which says how many there are; so the ids are
    whole, and each rank adds its rows at its ids.
    """
    ids, shard = op.shape(1), op.first_shard([0, 1])
    if shard.dim > 0:
        return LocalPlan(op.want([0], shard), [shard])
    require(op.type == "SegmentSum" and shard.outer == 1)
    require(ids[0] == shard.size and _has_numbers(op))

    def build(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
        own = _rows(local, inputs[1], shard, local.split)
        count = _count(local, inputs[1])
        return local.op("UnsortedSegmentSum", [inputs[0], own, count])

    return LocalPlan(op.want([0], shard), [SUM], build)


def _rows(local: LocalOps, vector: Ref, shard: Shard, split: Split) -> Ref:
    """A rank's part of a vector."""
    begin = split.first(shard.rows) * shard.inner
    bounds = [np.array([n], np.int32) for n in (begin, split.local_size(shard))]
    return local.op("Slice", [vector, *map(local.constant, bounds)])[0]


def _count(local: LocalOps, ids: Ref) -> Ref:
    """The number of segments, of which the last has the largest id; 0 without rows."""
    dtype = ids.dtype.as_numpy_dtype
    least = local.constant(np.array([-1], dtype))
    axis, one = local.constant(np.array(0, np.int32)), local.constant(dtype(1))
    all_ids = local.op("ConcatV2", [[ids, least], axis])[0]
    largest = local.op("Max", [all_ids, axis], keep_dims=False)[0]
    return local.op("AddV2", [largest, one])[0]


@rule(
    *("SparseSegmentSum", "SparseSegmentMean", "SparseSegmentSqrtN"),
    *("SparseSegmentSumWithNumSegments", "SparseSegmentMeanWithNumSegments"),
    *("SparseSegmentSqrtNWithNumSegments", "SparseSegmentSumGrad"),
    *("SparseSegmentMeanGrad", "SparseSegmentSqrtNGrad"),
)
def sparse_segments(op: PlacedOp) -> LocalPlan:
    """Rows of the first input are looked up; its other dimensions may be divided."""
    shard = op.shard()
    require(shard.dim != 0)
    return LocalPlan(op.want([0], shard), [shard])


@rule("Bincount")
def bincount(op: PlacedOp) -> LocalPlan:
    """The third input has weights, or is empty."""
    shard = op.first_shard([0, 2])
    has_weights = op.elements(2) != 0
    return LocalPlan(op.want([0, 2] if has_weights else [0], shard), [SUM])


@rule("HistogramFixedWidth")
def histogram(op: PlacedOp) -> LocalPlan:
    shard = op.shard()
    return LocalPlan(op.want([0], shard), [SUM])
