"""Ops on stacks of vectors or matrices; all inputs have the same outer dimensions."""

from __future__ import annotations

from tfcluster.runtime.partition.placement import REPLICATE, SUM, Placement
from tfcluster.runtime.partition.rules.table import Operation, Plan, rule


def _stacks(op: Operation, inputs: list[int], own: int) -> Plan | None:
    """Each input, and each output, has ``own`` dimensions beside the outer ones."""
    shard = op.first_shard(inputs)
    shapes = [op.shape(index) for index in inputs]
    known = [shape for shape in shapes if shape is not None]
    if shard is None or len(known) < len(shapes):
        return None
    outer = known[0][: len(known[0]) - own]
    if any(shape[: len(shape) - own] != outer for shape in known):
        return None
    if shard.dim >= len(outer):
        return None
    return Plan(op.want(inputs, shard), [shard] * len(op.outputs))


@rule("Cross")
def cross(op: Operation) -> Plan | None:
    return _stacks(op, [0, 1], 1)


@rule("IsotonicRegression")
def of_vectors(op: Operation) -> Plan | None:
    return _stacks(op, [0], 1)


@rule("MatrixSolveLs", "BandedTriangularSolve", "TridiagonalSolve")
def solve(op: Operation) -> Plan | None:
    return _stacks(op, [0, 1], 2)


@rule("TridiagonalMatMul")
def tridiagonal_product(op: Operation) -> Plan | None:
    return _stacks(op, [0, 1, 2, 3], 2)


@rule("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")
def fused_batch_norm_gradient(op: Operation) -> Plan | None:
    """Without training, the statistics do not depend on the rows."""
    shard = op.first_shard([0, 1])
    if shard is None or shard.dim != 0 or op.attribute("is_training"):
        return None
    rest: list[Placement] = [REPLICATE] * (len(op.outputs) - 3)
    return Plan(op.want([0, 1], shard), [shard, SUM, SUM, *rest])
