"""Rules of ops that compute each element from the elements at its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

from tests.runtime.partition.rule_checks import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    WIDE_FLOATS,
    Array,
    Case,
    Chance,
    check,
    few,
    ops_of,
    raw,
    run,
    seeds,
    some,
)
from tests.runtime.partition.rules_boxes import QUANTIZATION
from tests.runtime.partition.simulated import divide
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    SUM,
    Partial,
    Placement,
    Shard,
)
from tfcluster.runtime.partition.rules import elementwise

BYTES = (np.int8, np.uint8)
BOOLS = (np.bool_,)
HALF_AND_WIDE = (np.float16, *WIDE_FLOATS)

# The dtypes for which an op has a kernel.
UNARY: dict[str, Sequence[Any]] = {
    **dict.fromkeys(("Abs", "Sign"), (*FLOATS, *INTEGERS)),
    **dict.fromkeys(("Acos", "Acosh", "Asin", "Asinh", "Atan"), (*FLOATS, *COMPLEX)),
    **dict.fromkeys(("Atanh", "Cos", "Cosh", "Exp", "Expm1"), (*FLOATS, *COMPLEX)),
    **dict.fromkeys(("Inv", "Log", "Log1p", "Reciprocal"), (*FLOATS, *COMPLEX)),
    **dict.fromkeys(("Rsqrt", "Sigmoid", "Sin", "Sinh"), (*FLOATS, *COMPLEX)),
    **dict.fromkeys(("Sqrt", "Tan", "Tanh"), (*FLOATS, *COMPLEX)),
    **dict.fromkeys(("BesselI0", "BesselI0e", "BesselI1"), HALF_AND_WIDE),
    **dict.fromkeys(("BesselI1e", "BesselJ0", "BesselJ1"), HALF_AND_WIDE),
    **dict.fromkeys(("BesselK0", "BesselK0e", "BesselK1"), HALF_AND_WIDE),
    **dict.fromkeys(("BesselK1e", "BesselY0", "BesselY1"), HALF_AND_WIDE),
    **dict.fromkeys(("Digamma", "Lgamma"), HALF_AND_WIDE),
    **dict.fromkeys(("Ceil", "Elu", "Erf", "Erfc", "Floor", "IsFinite"), FLOATS),
    **dict.fromkeys(("IsInf", "IsNan", "LeakyRelu", "Selu", "Softplus"), FLOATS),
    **dict.fromkeys(("Softsign",), FLOATS),
    **dict.fromkeys(("Dawsn", "Erfinv", "Expint", "FresnelCos"), WIDE_FLOATS),
    **dict.fromkeys(("FresnelSin", "Ndtri", "Rint", "Spence"), WIDE_FLOATS),
    **dict.fromkeys(("Invert", "PopulationCount"), (*INTEGERS, *BYTES)),
    **dict.fromkeys(("Relu", "Relu6"), (*FLOATS, *INTEGERS, *BYTES)),
    "Round": (*FLOATS, *INTEGERS),
    "Square": (*FLOATS, *INTEGERS, *BYTES, *COMPLEX),
    "LogicalNot": BOOLS,
    **dict.fromkeys(("Angle", "ComplexAbs"), COMPLEX[:1]),
    "FakeQuantWithMinMaxArgs": (np.float32,),
}
BROADCAST: dict[str, Sequence[Any]] = {
    **dict.fromkeys(("Atan2",), FLOATS),
    **dict.fromkeys(("BitwiseAnd", "BitwiseOr", "BitwiseXor"), (*INTEGERS, *BYTES)),
    **dict.fromkeys(("LeftShift", "RightShift"), (*INTEGERS, *BYTES)),
    **dict.fromkeys(("Equal", "NotEqual"), (*FLOATS, *INTEGERS, *BOOLS, *COMPLEX)),
    **dict.fromkeys(("FloorDiv", "FloorMod", "TruncateDiv"), (*FLOATS, *INTEGERS)),
    **dict.fromkeys(("Greater", "GreaterEqual", "Less"), (*FLOATS, *INTEGERS)),
    **dict.fromkeys(("LessEqual", "Maximum", "Minimum"), (*FLOATS, *INTEGERS)),
    **dict.fromkeys(("Igamma", "Igammac", "IgammaGradA"), WIDE_FLOATS),
    **dict.fromkeys(("RandomGammaGrad", "Polygamma", "Zeta"), WIDE_FLOATS),
    **dict.fromkeys(("NextAfter",), WIDE_FLOATS),
    **dict.fromkeys(("LogicalAnd", "LogicalOr"), BOOLS),
    **dict.fromkeys(("Mod", "TruncateMod"), (*WIDE_FLOATS, *INTEGERS)),
    "MulNoNan": FLOATS,
    "Pow": FLOATS,
    "SquaredDifference": (*FLOATS, *INTEGERS),
    **dict.fromkeys(("Xdivy", "Xlog1py", "Xlogy"), FLOATS),
}
ALIKE: dict[str, Sequence[Any]] = {
    **dict.fromkeys(("EluGrad", "LeakyReluGrad", "SeluGrad"), FLOATS),
    **dict.fromkeys(("SoftplusGrad", "SoftsignGrad"), FLOATS),
    **dict.fromkeys(("Relu6Grad", "ReluGrad"), (*FLOATS, *INTEGERS)),
    **dict.fromkeys(("InvGrad", "ReciprocalGrad", "RsqrtGrad"), (*FLOATS, *COMPLEX)),
    **dict.fromkeys(("SigmoidGrad", "SqrtGrad", "TanhGrad"), (*FLOATS, *COMPLEX)),
    "ApproximateEqual": WIDE_FLOATS,
    "FakeQuantWithMinMaxArgsGradient": (np.float32,),
    "Betainc": WIDE_FLOATS,
}
# Each with a test of its own.
OTHERS = {
    *("ClipByValue", "SelectV2", "Select", "ZerosLike", "OnesLike", "Bitcast"),
    "Complex",
    *("Shape", "Size", "Rank", "ShapeN", "OneHot", "Bucketize"),
    *("QuantizeAndDequantizeV2", "QuantizeAndDequantizeV3"),
    *("QuantizeAndDequantizeV4", "FakeQuantWithMinMaxVars"),
    "FakeQuantWithMinMaxVarsPerChannel",
}
# Ops whose every element is rounded correctly, or is an integer.
EXACT = {
    *("Abs", "Sign", "Ceil", "Floor", "IsFinite", "IsInf", "IsNan", "Rint", "Invert"),
    *("PopulationCount", "Relu", "Relu6", "Round", "Square", "LogicalNot", "LeakyRelu"),
    *("BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift", "Equal"),
    *("NotEqual", "FloorDiv", "TruncateDiv", "Greater", "GreaterEqual", "Less"),
    *("LessEqual", "Maximum", "Minimum", "NextAfter", "LogicalAnd", "LogicalOr"),
    *("Mod", "TruncateMod", "FloorMod", "MulNoNan", "SquaredDifference"),
    *("Relu6Grad", "ReluGrad", "ApproximateEqual", "FakeQuantWithMinMaxArgs"),
    *("FakeQuantWithMinMaxArgsGradient", "LeakyReluGrad"),
}
POSITIVE = {
    *("BesselK0", "BesselK0e", "BesselK1", "BesselK1e", "BesselY0", "BesselY1"),
    *("Digamma", "Lgamma", "Expint", "Zeta", "Polygamma", "Igamma", "Igammac"),
    *("IgammaGradA", "RandomGammaGrad", "FloorDiv", "FloorMod", "TruncateDiv", "Pow"),
    *("Mod", "TruncateMod", "LeftShift", "RightShift"),
}
UNIT = {"Acos", "Asin", "Atanh", "Erfinv", "Ndtri", "Betainc"}


def test_every_op_has_a_case() -> None:
    known = {*UNARY, *BROADCAST, *ALIKE, *OTHERS, *QUANTIZATION}
    assert known == ops_of(elementwise)


def _values(op: str, shape: Sequence[int], dtype: Any, chance: Chance) -> Array:
    low, high = (1, 3) if op in POSITIVE else (0, 1) if op in UNIT else (-3, 3)
    values = chance.numbers(shape, dtype, low, high)
    is_float = values.dtype.kind not in "iubc"
    return chance.spoiled(values) if is_float and chance.yes(0.2) else values


def _ulps(op: str) -> float:
    return 0 if op in EXACT else 16


@pytest.mark.parametrize("op", UNARY)
@given(seeds)
@few
def test_of_one_input(op: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch()
        values = _values(op, shape, chance.of(UNARY[op]), chance)
        return Case(raw(op), [values], [shard], _ulps(op), [shard])

    check(make, seed)


@pytest.mark.parametrize("op", ALIKE)
@given(seeds)
@few
def test_of_inputs_of_one_shape(op: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch()
        dtype = chance.of(ALIKE[op])
        inputs = [
            _values(op, shape, dtype, chance)
            for _ in range(3 if op == "Betainc" else 2)
        ]
        return Case(raw(op), inputs, [shard] * len(inputs), _ulps(op), [shard])

    check(make, seed)


def _broadcast(
    chance: Chance, count: int
) -> tuple[list[tuple[int, ...]], list[Placement], Shard]:
    """Shapes that are broadcast to one, which has rows, and their placements."""
    shape, shard = chance.batch()
    has_rows = chance.below(count)
    shapes: list[tuple[int, ...]] = []
    plain: list[Placement] = []
    for index in range(count):
        own = [size if chance.yes(0.6) else 1 for size in shape]
        dropped = 0 if chance.yes() else chance.below(len(shape) + 1)
        if index == has_rows:
            own[shard.dim] = shard.size
            dropped = min(dropped, shard.dim)
        shapes.append(tuple(own[dropped:]))
        dim = shard.dim - dropped
        divided = dim >= 0 and own[shard.dim] == shard.size
        plain.append(shard.at(dim) if divided else REPLICATE)
    sizes = np.broadcast_shapes(*shapes)
    return shapes, plain, shard.at(shard.dim - len(shape) + len(sizes))


@pytest.mark.parametrize("op", BROADCAST)
@given(seeds)
@few
def test_of_inputs_that_are_broadcast(op: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shapes, plain, target = _broadcast(chance, 2)
        dtype = chance.of(BROADCAST[op])
        inputs = [_values(op, shape, dtype, chance) for shape in shapes]
        return Case(raw(op), inputs, plain, _ulps(op), [target])

    check(make, seed, others=3)


@given(seeds)
@some
def test_complex(seed: int) -> None:
    def make(chance: Chance) -> Case:
        shapes, plain, target = _broadcast(chance, 2)
        dtype = chance.of(WIDE_FLOATS)
        inputs = [chance.numbers(shape, dtype) for shape in shapes]
        made = tf.complex64 if dtype == np.float32 else tf.complex128
        return Case(raw("Complex", Tout=made), inputs, plain, 0, [target])

    check(make, seed)


@given(seeds)
@some
def test_comparison_of_shapes_that_do_not_fit(seed: int) -> None:
    chance = Chance(seed)
    rows = max(chance.rows, 2)
    inputs = [chance.numbers((rows, 2)), chance.numbers((rows + 1, 2))]
    call = raw("Equal", incompatible_shape_error=False)
    found = divide(call, inputs, [Shard(0, rows), REPLICATE], min(chance.size, rows))
    found.assert_equal()


@pytest.mark.parametrize("op", ["SelectV2", "ClipByValue"])
@given(seeds)
@some
def test_of_three_inputs_that_are_broadcast(op: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shapes, plain, target = _broadcast(chance, 3)
        dtype = chance.of((*FLOATS, *INTEGERS))
        if op == "ClipByValue":
            # Its first input has the shape of the result.
            shape, target = chance.batch()
            shapes = [shape, *(shape if chance.yes() else () for _ in range(2))]
            plain = [target if each == shape else REPLICATE for each in shapes]
        inputs = [chance.numbers(shape, dtype) for shape in shapes]
        if op == "SelectV2":
            inputs[0] = chance.numbers(shapes[0], np.bool_)
        return Case(raw(op), inputs, plain, 0, [target])

    check(make, seed)


@pytest.mark.parametrize("form", ["scalar", "vector", "alike"])
@given(seeds)
@some
def test_select(form: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch()
        of_mask = {"scalar": (), "vector": shape[:1], "alike": shape}[form]
        divided = form == "alike" or (form == "vector" and shard.dim == 0)
        mask = shard if divided else REPLICATE
        dtype = chance.of((*FLOATS, *INTEGERS))
        inputs = [
            chance.numbers(of_mask, np.bool_),
            *(chance.numbers(shape, dtype) for _ in range(2)),
        ]
        return Case(raw("Select"), inputs, [mask, shard, shard], 0, [shard])

    check(make, seed)


@pytest.mark.parametrize("op", ["ZerosLike", "OnesLike"])
@given(seeds)
@some
def test_constants(op: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch()
        return Case(raw(op), [chance.numbers(shape)], [shard], 0, [shard])

    check(make, seed)


@pytest.mark.parametrize("op", ["ZerosLike", "OnesLike", "Shape", "Size", "Rank"])
@pytest.mark.parametrize("placement", [SUM, Partial("max"), Partial("min")])
@given(seeds)
@few
def test_shapes_of_terms_need_no_exchange(
    op: str, placement: Partial, seed: int
) -> None:
    chance = Chance(seed)
    values = chance.numbers(chance.batch()[0])
    found = run(Case(raw(op), [values], [placement]), [placement], chance)
    assert not found.computed_whole
    assert found.outputs == [REPLICATE]
    found.assert_equal()


@pytest.mark.parametrize("op", ["Shape", "Size", "Rank", "ShapeN"])
@given(seeds)
@some
def test_shapes_that_are_not_known(op: str, seed: int) -> None:
    """The shape of a rank's rows is not that of the whole."""
    chance = Chance(seed)
    shape, shard = chance.batch((0, 1))

    def function(indices: Any, depth: Any) -> Any:
        unknown = tf.one_hot(indices, tf.math.bincount(depth)[0])
        one = tf.ones([2, 3])
        if op == "ShapeN":
            return tf.raw_ops.ShapeN(input=[unknown, unknown + 1, one])
        return raw(op)(unknown)

    inputs = [chance.numbers(shape, np.int32, 0, 2), np.array([0, 1, 0, 2], np.int32)]
    found = divide(function, inputs, [shard, REPLICATE], chance.size, chance.rows)
    found.assert_equal()
    assert not found.computed_whole


@given(seeds)
@some
def test_one_hot(seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch()
        axis = chance.below(len(shape) + 2) - 1
        place = len(shape) if axis == -1 else axis
        target = shard.at(shard.dim + (place <= shard.dim))

        def call(indices: Any, on: Any, off: Any) -> Any:
            return tf.raw_ops.OneHot(
                indices=indices, depth=3, on_value=on, off_value=off, axis=axis
            )

        indices = chance.numbers(shape, chance.of((*INTEGERS, np.uint8)), 0, 4)
        values = [chance.numbers((), np.float32) for _ in range(2)]
        return Case(
            call, [indices, *values], [shard, REPLICATE, REPLICATE], 0, [target]
        )

    check(make, seed)


@pytest.mark.parametrize(
    ("source", "target"),
    [(np.float32, tf.int32), (np.float64, tf.int32), (np.int32, tf.int64)],
)
@given(seeds)
@few
def test_bitcast(source: Any, target: tf.DType, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch(own=(2,) if source == np.int32 else ())
        values = chance.numbers(shape, source)
        return Case(raw("Bitcast", type=target), [values], [shard], 0, [shard])

    check(make, seed)


@given(seeds)
@some
def test_bucketize(seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch()
        values = chance.numbers(shape, chance.of((*WIDE_FLOATS, *INTEGERS)))
        call = raw("Bucketize", boundaries=[-1.0, 0.5, 2.0])
        return Case(call, [values], [shard], 0, [shard])

    check(make, seed)


@pytest.mark.parametrize("version", ["V2", "V3", "V4"])
@pytest.mark.parametrize("axis", [-1, 0, 1])
@given(seeds)
@few
def test_quantize_and_dequantize(version: str, axis: int, seed: int) -> None:
    """There may be a range for each channel."""

    def make(chance: Chance) -> Case:
        shape, shard = (chance.rows, 2, 3), Shard(0, chance.rows)
        values = chance.numbers(shape, chance.of(WIDE_FLOATS))
        by_channel = axis != -1
        high = chance.numbers(
            shape[axis : axis + 1] if by_channel else (), values.dtype, 1, 2
        )
        call = raw(f"QuantizeAndDequantize{version}", range_given=True, axis=axis)
        bounds: Placement = shard if axis == 0 and by_channel else REPLICATE
        inputs, plain = [values, -high, high], [shard, bounds, bounds]
        if version == "V3":
            inputs, plain = [*inputs, np.array(8, np.int32)], [*plain, REPLICATE]
        return Case(call, inputs, plain, 0, [shard])

    if version == "V3" or axis == -1:  # The kernels of the others take scalars only.
        check(make, seed)


@pytest.mark.parametrize("axis", [-1, 0, 1])
@given(seeds)
@few
def test_quantization_in_the_range_of_all_values(axis: int, seed: int) -> None:
    chance = Chance(seed)
    shape = (chance.rows, 2, 3)
    low = np.zeros(() if axis == -1 else shape[axis], np.float32)
    call = raw("QuantizeAndDequantizeV4", range_given=False, axis=axis)
    case = Case(call, [chance.numbers(shape), low, low], [])
    run(case, [Shard(0, chance.rows), REPLICATE, REPLICATE], chance).assert_equal()


@pytest.mark.parametrize("by_channel", [True, False])
@given(seeds)
@some
def test_fake_quantization(by_channel: bool, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch()
        own = shape[-1:] if by_channel else ()
        divided = by_channel and shard.dim == len(shape) - 1
        bounds: Placement = shard.at(0) if divided else REPLICATE
        inputs = [
            chance.numbers(shape, np.float32),
            chance.numbers(own, np.float32, -3, -1),
            chance.numbers(own, np.float32, 1, 3),
        ]
        name = "FakeQuantWithMinMaxVars" + ("PerChannel" if by_channel else "")
        return Case(raw(name), inputs, [shard, bounds, bounds], 0, [shard])

    check(make, seed)
