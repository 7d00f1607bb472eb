"""Rules of ops on boxes and places in images, on stacks, and on rounded numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

from tests.runtime.partition.rule_checks import (
    WIDE_FLOATS,
    Array,
    Case,
    Chance,
    check,
    few,
    raw,
    seeds,
)
from tfcluster.runtime.partition.placement import REPLICATE, SUM, Placement, Shard

BOXES = {
    *("DrawBoundingBoxes", "DrawBoundingBoxesV2", "CombinedNonMaxSuppression"),
    *("ExtractGlimpse", "ExtractGlimpseV2", "CropAndResizeGradImage"),
    *("CropAndResizeGradBoxes", "MaxPoolWithArgmax", "LRNGrad"),
    *("MaxPoolGradWithArgmax", "MaxPoolGradGradWithArgmax"),
}
"""Ops of ``rules.images``."""
MATRICES = {
    *("Cross", "IsotonicRegression", "MatrixSolveLs", "BandedTriangularSolve"),
    *("TridiagonalSolve", "TridiagonalMatMul", "FusedBatchNormGrad"),
    *("FusedBatchNormGradV2", "FusedBatchNormGradV3"),
}
"""Ops of ``rules.rows``."""
QUANTIZATION = {
    *("QuantizeAndDequantizeV4Grad", "FakeQuantWithMinMaxVarsGradient"),
    *("FakeQuantWithMinMaxVarsPerChannelGradient", "QuantizeV2", "Dequantize"),
}
"""Ops of ``rules.elementwise``."""
# These have kernels on graphics cards only, and the rule of an op that has a case.
WITHOUT_CASE = {"MaxPoolGradWithArgmax", "MaxPoolGradGradWithArgmax"}


def _images(chance: Chance, *own: int) -> tuple[Array, Shard]:
    shard = chance.shard(0)
    return chance.numbers((shard.size, *own)), shard


def _boxes(chance: Chance, *outer: int) -> Array:
    corners = chance.numbers((*outer, 2, 2), low=0, high=1)
    return np.sort(corners, axis=-2).reshape(*outer, 4)


def _drawn(chance: Chance) -> Case:
    images, shard = _images(chance, 5, 5, 3)
    found = _boxes(chance, len(images), 2)
    return Case(raw("DrawBoundingBoxes"), [images, found], [shard, shard], 0)


def _drawn_in_colours(chance: Chance) -> Case:
    case = _drawn(chance)
    colours = chance.numbers((2, 3))
    inputs, plain = [*case.inputs, colours], [*case.plain, REPLICATE]
    return Case(raw("DrawBoundingBoxesV2"), inputs, plain, 0)


def _suppressed(chance: Chance) -> Case:
    shard = chance.shard(0)
    found = _boxes(chance, shard.size, 4, 1)
    scores = chance.numbers((shard.size, 4, 2), low=0, high=1)
    suppress = raw("CombinedNonMaxSuppression")

    def call(places: Any, scores: Any) -> Any:
        size = tf.constant(2)
        return suppress(places, scores, size, size, tf.constant(0.5), tf.constant(0.1))

    return Case(call, [found, scores], [shard, shard], 0)


def _glimpse(op: str, chance: Chance) -> Case:
    images, shard = _images(chance, 5, 5, 2)
    call = raw(op, noise="zero", uniform_noise=False)
    return Case(
        lambda x, offsets: call(x, tf.constant([3, 3]), offsets),
        [images, chance.numbers((len(images), 2), low=-1, high=1)],
        [shard, shard],
        0,
    )


def _crop_gradient(chance: Chance) -> Case:
    shard = chance.shard(0)
    count = shard.size
    call = raw("CropAndResizeGradImage", T=tf.float32)
    return Case(
        lambda g, places, images: call(g, places, images, tf.constant([3, 6, 6, 2])),
        [
            chance.numbers((count, 2, 2, 2)),
            _boxes(chance, count),
            chance.random.integers(0, 3, count).astype(np.int32),
        ],
        [shard, shard, shard],
        outputs=[SUM],
    )


def _crop_gradient_of_boxes(chance: Chance) -> Case:
    shard = chance.shard(0)
    count = shard.size
    return Case(
        raw("CropAndResizeGradBoxes"),
        [
            chance.numbers((count, 2, 2, 2)),
            chance.numbers((3, 6, 6, 2)),
            _boxes(chance, count),
            chance.random.integers(0, 3, count).astype(np.int32),
        ],
        [shard, REPLICATE, shard, shard],
    )


def _pool(chance: Chance) -> Case:
    images, shard = _images(chance, 4, 4, 2)
    window = [1, 2, 2, 1]
    call = raw("MaxPoolWithArgmax", ksize=window, strides=window, padding="VALID")
    return Case(call, [images], [shard], 0)


def _responses(chance: Chance) -> Case:
    images, shard = _images(chance, 2, 2, 4)
    rest = [chance.numbers(images.shape) for _ in range(2)]
    return Case(raw("LRNGrad"), [images, *rest], [shard, shard, shard])


def _stacks(op: str, *own: Sequence[int]) -> Callable[[Chance], Case]:
    def make(chance: Chance) -> Case:
        outer, shard = chance.batch((0, 1))
        # The kernels do not take empty stacks.
        outer = tuple(size or 1 for size in outer)
        dtype = np.float32 if op == "IsotonicRegression" else chance.of(WIDE_FLOATS)
        inputs = []
        for index, each in enumerate(own):
            found = chance.numbers((*outer, *each), dtype)
            if index == 0 and len(each) == 2 and each[0] == each[1]:
                found = found + 8 * np.eye(each[0], dtype=dtype)
            if "Tridiagonal" in op or "Banded" in op:
                found = found + (index == 0) * dtype(8)
            inputs.append(found)
        return Case(raw(op), inputs, [shard] * len(own), 64)

    return make


def _least_squares(chance: Chance) -> Case:
    case = _stacks("MatrixSolveLs", (3, 2), (3, 2))(chance)
    solve = raw("MatrixSolveLs", fast=True)
    return Case(
        lambda a, b: solve(a, b, tf.constant(0.5, tf.float64)),
        case.inputs,
        case.plain,
        1024,
    )


def _norm_gradient(op: str, chance: Chance) -> Case:
    images, shard = _images(chance, 2, 2, 3)
    statistics = [chance.numbers((3,), low=1) for _ in range(3)]
    inputs = [images, chance.numbers(images.shape), *statistics]
    plain: list[Placement] = [shard, shard, *[REPLICATE] * 3]
    if op.endswith("V3"):
        inputs.append(statistics[2])
        plain.append(REPLICATE)
    call = raw(op, is_training=False, epsilon=0.1)
    return Case(lambda *x: call(*x)[:3], inputs, plain, 32)


def _straight_through(chance: Chance) -> Case:
    shape, shard = chance.batch((0, 2))
    limits = [np.array(limit, np.float32) for limit in (-1, 2)]
    inputs = [chance.numbers(shape), chance.numbers(shape), *limits]
    plain: list[Placement] = [shard, shard, REPLICATE, REPLICATE]
    return Case(raw("QuantizeAndDequantizeV4Grad"), inputs, plain, 0)


def _fake_gradient(op: str, chance: Chance) -> Case:
    shape, shard = chance.batch((0, 1), [4])
    size = (4,) if "PerChannel" in op else ()
    low, high = (np.full(size, limit, np.float32) for limit in (-1, 2))
    inputs = [chance.numbers(shape), chance.numbers(shape), low, high]
    plain: list[Placement] = [shard, shard, REPLICATE, REPLICATE]
    return Case(raw(op), inputs, plain, outputs=[shard, SUM, SUM])


def _round_trip(chance: Chance) -> Case:
    shape, shard = chance.batch((0, 2))

    def call(x: Any) -> Any:
        limits = tf.constant(-2.0), tf.constant(2.0)
        found = tf.raw_ops.QuantizeV2(
            input=x, min_range=limits[0], max_range=limits[1], T=tf.quint8
        )
        return tf.raw_ops.Dequantize(
            input=found[0], min_range=found[1], max_range=found[2]
        )

    return Case(call, [chance.numbers(shape)], [shard], 0)


MAKERS: dict[str, Callable[[Chance], Case]] = {
    "DrawBoundingBoxes": _drawn,
    "DrawBoundingBoxesV2": _drawn_in_colours,
    "CombinedNonMaxSuppression": _suppressed,
    "ExtractGlimpse": lambda chance: _glimpse("ExtractGlimpse", chance),
    "ExtractGlimpseV2": lambda chance: _glimpse("ExtractGlimpseV2", chance),
    "CropAndResizeGradImage": _crop_gradient,
    "CropAndResizeGradBoxes": _crop_gradient_of_boxes,
    "MaxPoolWithArgmax": _pool,
    "LRNGrad": _responses,
    "Cross": _stacks("Cross", (3,), (3,)),
    "IsotonicRegression": _stacks("IsotonicRegression", (4,)),
    "MatrixSolveLs": _least_squares,
    "BandedTriangularSolve": _stacks("BandedTriangularSolve", (2, 3), (3, 2)),
    "TridiagonalSolve": _stacks("TridiagonalSolve", (3, 4), (4, 2)),
    "TridiagonalMatMul": _stacks("TridiagonalMatMul", (1, 3), (1, 3), (1, 3), (3, 2)),
    **{
        op: lambda chance, op=op: _norm_gradient(op, chance)  # type: ignore[misc]
        for op in sorted(MATRICES)
        if op.startswith("FusedBatchNorm")
    },
    "QuantizeAndDequantizeV4Grad": _straight_through,
    **{
        op: lambda chance, op=op: _fake_gradient(op, chance)  # type: ignore[misc]
        for op in sorted(QUANTIZATION)
        if op.startswith("FakeQuant")
    },
    "QuantizeV2": _round_trip,
    "Dequantize": _round_trip,
}


def test_every_op_is_checked() -> None:
    assert {*MAKERS, *WITHOUT_CASE} == BOXES | MATRICES | QUANTIZATION


@pytest.mark.parametrize("op", MAKERS)
@given(seeds)
@few
def test_op(op: str, seed: int) -> None:
    check(MAKERS[op], seed)
