"""Ops that read and add at indices: embeddings, gathers, scatters, segments."""

from __future__ import annotations

import tensorflow as tf

from tfcluster.runtime.partition.placement import REPLICATE, SUM, Partial, Shard
from tfcluster.runtime.partition.rules.table import (
    LocalPlan,
    PlacedOp,
    Whole,
    require,
    rule,
)


@rule("Gather", "GatherV2", "ResourceGather")
def gather(op: PlacedOp) -> LocalPlan:
    """Indices may be divided, or the dimensions of the table that are not looked up."""
    is_variable = op.type == "ResourceGather"
    table, indices = op.placements[0], op.placements[1]
    index_shape = op.shape(1)
    batch = int(op.attribute("batch_dims") or 0)
    batch += len(index_shape) if batch < 0 else 0
    axis = op.integer(2) % len(op.shape(0)) if op.type == "GatherV2" else batch
    if isinstance(indices, Shard):
        if indices.dim >= batch:
            target = indices.at(axis + indices.dim - batch)
            return LocalPlan(op.want([1], indices), [target])
        require(not is_variable)
        return LocalPlan(op.want([0, 1], indices), [indices])
    if not isinstance(table, Shard) or table.dim == axis:
        raise Whole
    if table.dim < batch:
        return LocalPlan(op.want([0, 1], table), [table])
    if table.dim < axis:
        return LocalPlan(op.want([0], table), [table])
    return LocalPlan(
        op.want([0], table), [table.at(table.dim + len(index_shape) - batch - 1)]
    )


@rule("GatherNd", "ResourceGatherNd")
def gather_nd(op: PlacedOp) -> LocalPlan:
    shard, shape = op.shard(1), op.shape(1)
    require(shard.dim < len(shape) - 1)
    return LocalPlan(op.want([1], shard), [shard])


@rule("ScatterNd")
def scatter_nd(op: PlacedOp) -> LocalPlan:
    """Every rank adds its rows to zeros."""
    if op.placements[1] == SUM and op.placements[0] == REPLICATE:
        return LocalPlan(op.want([1], SUM), [SUM])
    shard = op.first_shard([0, 1])
    require(shard.dim < len(op.shape(0)) - 1)
    require(_can_be_added(op))
    return op.added_up([shard, shard, REPLICATE], SUM)


@rule(
    *("UnsortedSegmentSum", "UnsortedSegmentProd"),
    *("UnsortedSegmentMax", "UnsortedSegmentMin"),
)
def unsorted_segments(op: PlacedOp) -> LocalPlan:
    """Every rank adds its rows to their segments; others are zero.

    An empty segment has the lowest (or highest) number, on each rank as well.
    """
    _, segments = op.shape(0), op.shape(1)
    is_sum = op.type == "UnsortedSegmentSum"
    if is_sum and op.placements[0] == SUM and op.placements[1] == REPLICATE:
        return LocalPlan(op.want([0], SUM), [SUM])
    shard = op.first_shard([0, 1])
    if shard.dim >= len(segments):
        target = shard.at(shard.dim - len(segments) + 1)
        return LocalPlan(op.want([0], shard), [target])
    want = op.want([0, 1], shard)
    if is_sum:
        require(_can_be_added(op))
        return op.added_up(want, SUM)
    kind = op.type.removeprefix("UnsortedSegment").lower()
    require(kind != "prod")
    return op.added_up(want, Partial(kind))


@rule("DenseBincount")
def dense_bincount(op: PlacedOp) -> LocalPlan:
    shard, shape = op.shard(), op.shape()
    no_weights = op.elements(2) == 0
    want = op.want([0], shard) if no_weights else op.want([0, 2], shard)
    if len(shape) == 2:
        require(shard.dim == 0)
        return LocalPlan(want, [shard])
    return op.added_up(want, Partial("max") if op.attribute("binary_output") else SUM)


def _can_be_added(op: PlacedOp) -> bool:
    return op.outputs[0].dtype not in (tf.bool, tf.string)
