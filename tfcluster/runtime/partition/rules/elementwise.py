"""Ops that compute each element from the elements at its place, or round it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfcluster.runtime.partition.graph import Node, elements_of
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    SUM,
    Partial,
    Placement,
    Shard,
)
from tfcluster.runtime.partition.rules.table import (
    LocalOps,
    LocalPlan,
    PlacedOp,
    Whole,
    known,
    require,
    rule,
)
from tfcluster.runtime.partition.writer import Ref

_UNARY = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BesselI0"),
    *("BesselI0e", "BesselI1", "BesselI1e", "BesselJ0", "BesselJ1", "BesselK0"),
    *("BesselK0e", "BesselK1", "BesselK1e", "BesselY0", "BesselY1"),
    *("Ceil", "Cos", "Cosh", "Dawsn", "Digamma", "Elu", "Erf", "Erfc", "Erfinv"),
    *("Exp", "Expint", "Expm1", "Floor", "FresnelCos", "FresnelSin", "Inv"),
    *("Invert", "IsFinite", "IsInf", "IsNan", "LeakyRelu", "Lgamma", "Log"),
    *("Log1p", "LogicalNot", "Ndtri", "PopulationCount", "Reciprocal", "Relu"),
    *("Relu6", "Rint", "Round", "Rsqrt", "Selu", "Sigmoid", "Sign", "Sin", "Sinh"),
    *("Softplus", "Softsign", "Spence", "Sqrt", "Square", "Tan", "Tanh"),
    *("Angle", "Bucketize", "ComplexAbs", "FakeQuantWithMinMaxArgs"),
)
_BINARY = (
    *("ApproximateEqual", "Atan2", "BitwiseAnd", "BitwiseOr", "BitwiseXor"),
    *("Complex", "EluGrad", "Equal", "FloorDiv", "FloorMod", "Greater"),
    *("GreaterEqual", "Igamma", "Igammac", "IgammaGradA", "InvGrad"),
    *("LeakyReluGrad", "LeftShift", "Less", "LessEqual", "LogicalAnd", "LogicalOr"),
    *("Maximum", "Minimum", "Mod", "MulNoNan", "NextAfter", "NotEqual"),
    *(
        "Polygamma",
        "Pow",
        "RandomGammaGrad",
        "ReciprocalGrad",
        "Relu6Grad",
        "ReluGrad",
        "RightShift",
        "RsqrtGrad",
    ),
    *("SeluGrad", "SigmoidGrad", "SoftplusGrad", "SoftsignGrad", "SqrtGrad"),
    *("SquaredDifference", "TanhGrad", "TruncateDiv", "TruncateMod", "Xdivy"),
    *("Xlog1py", "Xlogy", "Zeta", "FakeQuantWithMinMaxArgsGradient"),
)
_TERNARY = (
    *("Betainc", "ClipByValue", "FakeQuantWithMinMaxVars"),
    *("FakeQuantWithMinMaxVarsPerChannel", "SelectV2"),
)


ELEMENTWISE = (*_UNARY, *_BINARY, *_TERNARY)


@rule(*ELEMENTWISE)
def elementwise(op: PlacedOp) -> LocalPlan:
    """All inputs are broadcast to the output's shape, and divided alike."""
    target = _target(op)
    return LocalPlan(_broadcast_wants(op, target), [target] * len(op.outputs))


def _target(op: PlacedOp) -> Shard:
    """The placement of the largest divided input, as the output has it."""
    output = op.output_shape()
    largest: tuple[int, Shard] | None = None
    for index, placement in enumerate(op.placements):
        shape = op.shape(index)
        if len(shape) > len(output):
            raise Whole
        if isinstance(placement, Shard):
            own = placement.at(placement.dim + len(output) - len(shape))
            size = elements_of(shape) or 0
            if output[own.dim] == own.size and (largest is None or size > largest[0]):
                largest = size, own
    return known(largest)[1]


def _broadcast_wants(op: PlacedOp, target: Shard) -> list[Placement]:
    """The placements of inputs that are broadcast to an output with ``target``."""
    output = op.output_shape()
    want: list[Placement] = []
    for index in range(len(op.inputs)):
        shape = op.shape(index)
        dim = target.dim - (len(output) - len(shape))
        if dim < 0 or (shape[dim] == 1 and output[target.dim] != 1):
            want.append(REPLICATE)
        elif shape[dim] == output[target.dim]:
            want.append(target.at(dim))
        else:
            raise Whole
    return want


@rule("Select")
def select(op: PlacedOp) -> LocalPlan:
    """The condition may be a scalar, or have one entry for each entry of dimension 0.

    It is not broadcast otherwise.
    """
    condition, value = op.shape(0), op.shape(1)
    if len(condition) == len(value) or not condition:
        return elementwise(op)
    # A divided condition is a vector, so its rows are those of dimension 0.
    shard = op.first_shard([1, 2, 0])
    mask: Placement = shard if shard.dim == 0 else REPLICATE
    return LocalPlan([mask, shard, shard], [shard])


@rule("ZerosLike", "OnesLike")
def constant_like(op: PlacedOp) -> LocalPlan:
    """Only the shape matters, and every rank's term has the whole shape."""
    placement = op.placements[0]
    if isinstance(placement, Partial):
        return LocalPlan([placement], [REPLICATE])
    if op.is_list():
        return LocalPlan([placement], [placement])
    return elementwise(op)


@rule("Rank", "Shape", "ShapeN", "Size")
def shape_of(op: PlacedOp) -> LocalPlan:
    """Every rank's term has the whole shape.

    A rank's rows have not, but its size along their dimension is known.
    """
    shards = {i: s for i, s in enumerate(op.placements) if isinstance(s, Shard)}
    if any(op.inputs[index].shape is None for index in shards):
        raise Whole
    replicated = [REPLICATE] * len(op.outputs)
    if not shards or op.type == "Rank":
        return LocalPlan(list(op.placements), replicated)

    def build(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
        if node.type == "Size":
            return [_whole_size(local, node, inputs[0], shards[0])]
        shapes = local.repeat(node, inputs)
        return [
            _whole_shape(local, node, index, ref, shards[index])
            if index in shards
            else ref
            for index, ref in enumerate(shapes)
        ]

    return LocalPlan(list(op.placements), replicated, build)


def _whole_shape(
    local: LocalOps, node: Node, index: int, part: Ref, shard: Shard
) -> Ref:
    """The shape of an input, given that of a rank's rows."""
    shape = node.inputs[index].shape
    assert shape is not None
    rows = np.arange(len(shape)) == shard.dim
    size = np.full(len(shape), shard.size, part.dtype.as_numpy_dtype)
    inputs = [local.constant(rows), local.constant(size), part]
    return local.op("SelectV2", inputs)[0]


def _whole_size(local: LocalOps, node: Node, part: Ref, shard: Shard) -> Ref:
    """The number of elements of an input, given a rank's rows."""
    dtype = node.outputs[0].dtype
    shape = local.op("Shape", [part], out_type=dtype)[0]
    whole = _whole_shape(local, node, 0, shape, shard)
    return local.op("Prod", [whole, local.constant(np.array([0], np.int32))])[0]


@rule("OneHot")
def one_hot(op: PlacedOp) -> LocalPlan:
    shape, shard = op.shape(), op.shard()
    axis = op.attribute("axis")
    axis = len(shape) if axis in (-1, None) else axis
    target = shard.at(shard.dim + (axis <= shard.dim))
    return LocalPlan(op.want([0], shard), [target])


@rule("Bitcast")
def bitcast(op: PlacedOp) -> LocalPlan:
    """A dimension may come or go at the end."""
    shard, shape, output = op.shard(), op.shape(), op.output_shape()
    require(shard.dim < min(len(shape), len(output)))
    return LocalPlan([shard], [shard])


@rule(
    *("QuantizeAndDequantizeV2", "QuantizeAndDequantizeV3"),
    "QuantizeAndDequantizeV4",
)
def quantize_and_dequantize(op: PlacedOp) -> LocalPlan:
    """If the range is not given, it is that of all values.

    A range has one entry, or one for each entry of the dimension ``axis``.
    """
    shard = op.shard()
    require(op.attribute("range_given"))
    want = op.want([0], shard)
    for index in (1, 2):
        if op.inputs[index].shape != () and op.attribute("axis") == shard.dim:
            want[index] = shard.at(0)
    return LocalPlan(want, [shard])


@rule("QuantizeAndDequantizeV4Grad")
def round_trip_gradient(op: PlacedOp) -> LocalPlan:
    """The limits have no gradient: it is zero."""
    shard = op.first_shard([0, 1])
    require(not _has_own_limits(op, shard))
    return LocalPlan(op.want([0, 1], shard), [shard, REPLICATE, REPLICATE])


@rule(
    *("FakeQuantWithMinMaxVarsGradient", "FakeQuantWithMinMaxVarsPerChannelGradient"),
)
def fake_gradient(op: PlacedOp) -> LocalPlan:
    """The gradients of the limits are sums over all numbers."""
    shard, shape = op.first_shard([0, 1]), op.shape()
    require("PerChannel" not in op.type or shard.dim != len(shape) - 1)
    outputs: list[Placement] = [shard, SUM, SUM]
    return LocalPlan(op.want([0, 1], shard), outputs)


@rule("QuantizeV2", "Dequantize")
def quantize(op: PlacedOp) -> LocalPlan:
    """The limits are given; adjusted ones are further outputs."""
    shard = op.shard()
    require(not _has_own_limits(op, shard))
    rest = [REPLICATE] * (len(op.outputs) - 1)
    return LocalPlan(op.want([0], shard), [shard, *rest])


def _has_own_limits(op: PlacedOp, shard: Shard) -> bool:
    """Whether each entry along the rows has limits of its own."""
    axis = op.attribute("axis")
    return axis is not None and axis == shard.dim
