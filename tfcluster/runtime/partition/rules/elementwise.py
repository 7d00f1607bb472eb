"""Ops that compute each element from the elements at its place."""

from __future__ import annotations

from tfcluster.runtime.partition.graph import elements_of
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    Partial,
    Placement,
    Shard,
)
from tfcluster.runtime.partition.rules.table import Operation, Plan, rule

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
    *("Angle", "Conj", "ComplexAbs", "QuantizeAndDequantizeV2", "AdjustHue"),
    *("FakeQuantWithMinMaxArgs", "FakeQuantWithMinMaxVars"),
)
_BINARY = (
    *("ApproximateEqual", "Atan2", "BitwiseAnd", "BitwiseOr", "BitwiseXor"),
    *("Complex", "EluGrad", "Equal", "FloorDiv", "FloorMod", "Greater"),
    *("GreaterEqual", "Igamma", "Igammac", "IgammaGradA", "InvGrad"),
    *("LeakyReluGrad", "LeftShift", "Less", "LessEqual", "LogicalAnd", "LogicalOr"),
    *("Maximum", "Minimum", "Mod", "NextAfter", "NotEqual", "Polygamma", "Pow"),
    *("ReciprocalGrad", "Relu6Grad", "ReluGrad", "RightShift", "RsqrtGrad"),
    *("SeluGrad", "SigmoidGrad", "SoftplusGrad", "SoftsignGrad", "SqrtGrad"),
    *("SquaredDifference", "TanhGrad", "TruncateDiv", "TruncateMod", "Xdivy"),
    *("Xlog1py", "Xlogy", "Zeta", "FakeQuantWithMinMaxArgsGradient"),
)
_MORE = ("Betainc", "ClipByValue", "SelectV2")


@rule(*_UNARY, *_BINARY, *_MORE)
def elementwise(op: Operation) -> Plan | None:
    """All inputs are broadcast to the output's shape, and divided alike."""
    target = _target(op)
    if target is None:
        return None
    want = broadcast_wants(op, target)
    return None if want is None else Plan(want, [target] * len(op.outputs))


def _target(op: Operation) -> Shard | None:
    """The placement of the largest divided input, as the output has it."""
    output = op.output_shape()
    if output is None:
        return None
    found: tuple[int, Shard] | None = None
    for index, placement in enumerate(op.placements):
        if isinstance(placement, Shard):
            shape = op.shape(index)
            if shape is None:
                return None
            size = elements_of(shape) or 0
            if found is None or size > found[0]:
                found = size, placement.at(placement.dim + len(output) - len(shape))
    return None if found is None else found[1]


def broadcast_wants(op: Operation, target: Shard) -> list[Placement] | None:
    """The placements of inputs that are broadcast to an output with ``target``."""
    output = op.output_shape()
    assert output is not None
    want: list[Placement] = []
    for index in range(len(op.inputs)):
        shape = op.shape(index)
        if shape is None:
            return None
        dim = target.dim - (len(output) - len(shape))
        if dim < 0 or (shape[dim] == 1 and output[target.dim] != 1):
            want.append(REPLICATE)
        elif shape[dim] == output[target.dim]:
            want.append(target.at(dim))
        else:
            return None
    return want


@rule("Select")
def select(op: Operation) -> Plan | None:
    """The condition may be a scalar, or have one entry for each row."""
    condition, value = op.shape(0), op.shape(1)
    if condition is None or value is None:
        return None
    if len(condition) == len(value) or not condition:
        return elementwise(op)
    if len(condition) != 1:
        return None
    shard = op.first_shard([1, 2])
    if shard is None and (of_condition := op.shard(0)) is not None:
        shard = of_condition
    if shard is None:
        return None
    mask: Placement = shard if shard.dim == 0 else REPLICATE
    return Plan([mask, shard, shard], [shard])


@rule("ZerosLike", "OnesLike")
def constant_like(op: Operation) -> Plan | None:
    """Only the shape matters, and every rank's term has the whole shape."""
    placement = op.placements[0]
    if isinstance(placement, Partial):
        return Plan([placement], [REPLICATE])
    if op.is_list():
        return Plan([placement], [placement])
    return elementwise(op)


@rule("Shape", "Size", "Rank", "ShapeN")
def shape_of(op: Operation) -> Plan | None:
    """Every rank's term has the whole shape; rows have not."""
    if all(not isinstance(each, Shard) for each in op.placements):
        return Plan(list(op.placements), [REPLICATE] * len(op.outputs))
    return None


@rule("OneHot")
def one_hot(op: Operation) -> Plan | None:
    shape, shard = op.shape(), op.shard()
    if shard is None or shape is None:
        return None
    axis = op.attribute("axis")
    axis = len(shape) if axis in (-1, None) else axis
    target = shard.at(shard.dim + (axis <= shard.dim))
    return Plan(op.wants(i0=shard), [target])


@rule("Bitcast")
def bitcast(op: Operation) -> Plan | None:
    """A dimension may come or go at the end."""
    shard, shape, output = op.shard(), op.shape(), op.output_shape()
    if shard is None or shape is None or output is None:
        return None
    if shard.dim >= min(len(shape), len(output)):
        return None
    return Plan([shard], [shard])


@rule("Bucketize", "LRN", "Quantize")
def by_element_of_first(op: Operation) -> Plan | None:
    """The other inputs are whole."""
    shard, shape = op.shard(), op.shape()
    if shard is None or shape is None:
        return None
    if op.type == "LRN" and shard.dim == len(shape) - 1:
        return None
    return Plan(op.wants(i0=shard), [shard])
