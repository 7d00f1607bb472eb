"""Ops that round numbers to few values between two limits, and gradients of those."""

from __future__ import annotations

from tfcluster.runtime.partition.placement import REPLICATE, SUM, Placement, Shard
from tfcluster.runtime.partition.rules.table import Operation, Plan, require, rule


@rule("QuantizeAndDequantizeV4Grad")
def round_trip_gradient(op: Operation) -> Plan:
    """The limits have no gradient: it is zero."""
    shard = op.first_shard([0, 1])
    require(not _has_own_limits(op, shard))
    return Plan(op.want([0, 1], shard), [shard, REPLICATE, REPLICATE])


@rule(
    *("FakeQuantWithMinMaxVarsGradient", "FakeQuantWithMinMaxVarsPerChannelGradient"),
)
def fake_gradient(op: Operation) -> Plan:
    """The gradients of the limits are sums over all numbers."""
    shard, shape = op.first_shard([0, 1]), op.shape()
    require("PerChannel" not in op.type or shard.dim != len(shape) - 1)
    outputs: list[Placement] = [shard, SUM, SUM]
    return Plan(op.want([0, 1], shard), outputs)


@rule("QuantizeV2", "Dequantize")
def quantize(op: Operation) -> Plan:
    """The limits are given; adjusted ones are further outputs."""
    shard = op.shard()
    require(not _has_own_limits(op, shard))
    rest = [REPLICATE] * (len(op.outputs) - 1)
    return Plan(op.wants(i0=shard), [shard, *rest])


def _has_own_limits(op: Operation, shard: Shard) -> bool:
    """Whether each entry along the rows has limits of its own."""
    axis = op.attribute("axis")
    return axis is not None and axis == shard.dim
