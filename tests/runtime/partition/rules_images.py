"""Rules of convolutions, pooling and other ops on images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given

from tests.runtime.partition.rule_checks import (
    FLOATS,
    INTEGERS,
    WIDE_FLOATS,
    Array,
    Case,
    Chance,
    assert_close,
    check,
    few,
    ops_of,
    raw,
    run,
    seeds,
    some,
)
from tests.runtime.partition.rules_boxes import BOXES
from tfcluster.runtime.partition.placement import REPLICATE, SUM, Placement, Shard
from tfcluster.runtime.partition.rules import images

ULPS = 64
PADDINGS = ("SAME", "VALID")


def _images(
    chance: Chance, own: Sequence[int], dtype: Any = np.float32
) -> tuple[Array, Shard]:
    shard = chance.shard(0)
    return chance.numbers((shard.size, *own), dtype), shard


def _whole(function: Callable[..., Any], *inputs: Array) -> Array:
    """What an op of one machine makes of the inputs."""
    return np.asarray(function(*map(tf.constant, inputs)))


# --- ops on one tensor of images ------------------------------------------------------


def _convolution(op: str) -> Callable[[Chance], Case]:
    """With random paddings, strides and dilations, of 2 or 3 dimensions."""

    def make(chance: Chance) -> Case:
        dims = 3 if "3D" in op else 2
        padding = chance.of(PADDINGS)
        stride, dilation = chance.of(((1, 1), (2, 1), (1, 2)))
        if dims == 3 or "Depthwise" in op:
            dilation = 1  # The kernels for CPUs have no other.
        dtype = chance.of((np.float16, *WIDE_FLOATS))
        values, shard = _images(chance, [5] * dims + [2], dtype)
        filters = chance.numbers([3] * dims + [2, 3], dtype)
        sizes = {
            "strides": [1, *[stride] * dims, 1],
            "dilations": [1, *[dilation] * dims, 1],
        }
        call = raw(op, padding=padding, **sizes)
        return Case(call, [values, filters], [shard, REPLICATE], ULPS, [shard])

    return make


def _of_images(
    call: Callable[..., Any],
    own: Sequence[int],
    *others: Array,
    dtypes: Sequence[Any] = (np.float32,),
    ulps: float = ULPS,
) -> Callable[[Chance], Case]:
    """An op on images of the sizes ``own`` and constants."""

    def make(chance: Chance) -> Case:
        values, shard = _images(chance, own, chance.of(dtypes))
        constants = [
            each.astype(values.dtype) if each.dtype == float else each
            for each in others
        ]
        return Case(_with(constants, call), [values], [shard], ulps, [shard])

    return make


def _with(constants: Sequence[Array], call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs: call(*inputs, *map(tf.constant, constants))


def _ints(*values: int) -> Array:
    return np.array(values, np.int32)


POOL = {"ksize": [1, 3, 2, 1], "strides": [1, 2, 1, 1]}
POOL_3D = {"ksize": [1, 2, 2, 2, 1], "strides": [1, 1, 2, 1, 1]}
ONE = {"strides": [1, 1, 1, 1], "rates": [1, 2, 1, 1]}
RANDOM = np.random.default_rng(0)

ON_IMAGES: dict[str, Callable[[Chance], Case]] = {
    **{op: _convolution(op) for op in ("Conv", "Conv2D", "Conv3D")},
    "DepthwiseConv2dNative": _convolution("DepthwiseConv2dNative"),
    "Dilation2D": _of_images(
        raw("Dilation2D", padding="SAME", **ONE),
        (4, 4, 2),
        RANDOM.normal(size=(2, 2, 2)),
        dtypes=WIDE_FLOATS,
    ),
    "MaxPool": _of_images(
        raw("MaxPool", padding="SAME", **POOL), (5, 4, 2), dtypes=FLOATS, ulps=0
    ),
    "AvgPool": _of_images(
        raw("AvgPool", padding="VALID", **POOL), (5, 4, 2), dtypes=FLOATS
    ),
    "MaxPoolV2": _of_images(
        raw("MaxPoolV2", padding="SAME"),
        (5, 4, 2),
        _ints(1, 2, 2, 1),
        _ints(1, 2, 1, 1),
        ulps=0,
    ),
    "MaxPool3D": _of_images(
        raw("MaxPool3D", padding="SAME", **POOL_3D), (3, 4, 3, 2), ulps=0
    ),
    "AvgPool3D": _of_images(raw("AvgPool3D", padding="VALID", **POOL_3D), (3, 4, 3, 2)),
    "DepthToSpace": _of_images(raw("DepthToSpace", block_size=2), (2, 3, 8), ulps=0),
    "SpaceToDepth": _of_images(raw("SpaceToDepth", block_size=2), (4, 2, 3), ulps=0),
    "ExtractImagePatches": _of_images(
        raw(
            "ExtractImagePatches",
            ksizes=[1, 2, 2, 1],
            strides=[1, 1, 2, 1],
            rates=[1, 2, 1, 1],
            padding="SAME",
        ),
        (4, 5, 2),
        ulps=0,
    ),
    "ExtractVolumePatches": _of_images(
        raw(
            "ExtractVolumePatches",
            ksizes=[1, 2, 2, 2, 1],
            strides=[1, 1, 2, 1, 1],
            padding="VALID",
        ),
        (3, 4, 3, 2),
        ulps=0,
    ),
    **{
        op: _of_images(raw(op), (4, 3, 2), _ints(5, 6), dtypes=(*WIDE_FLOATS, np.int32))
        for op in ("ResizeBilinear", "ResizeNearestNeighbor")
    },
    **{
        op: _of_images(raw(op), (4, 3, 2), _ints(5, 6), dtypes=WIDE_FLOATS)
        for op in ("ResizeBicubic", "ResizeArea")
    },
    "ScaleAndTranslate": _of_images(
        raw("ScaleAndTranslate"),
        (4, 3, 2),
        _ints(5, 6),
        np.array([1.5, 0.5], np.float32),
        np.array([0.5, 0.0], np.float32),
    ),
    "ResizeNearestNeighborGrad": _of_images(
        raw("ResizeNearestNeighborGrad"), (4, 6, 2), _ints(2, 3), dtypes=WIDE_FLOATS
    ),
}


# --- gradients ------------------------------------------------------------------------


def _pooling_gradient(
    op: str, forward: str, own: Sequence[int], sizes: dict[str, Any]
) -> Callable[[Chance], Case]:
    """Of ``forward``, for its input, its output, and a gradient."""

    def make(chance: Chance) -> Case:
        padding = chance.of(PADDINGS)
        values, shard = _images(chance, own)
        output = _whole(raw(forward, padding=padding, **sizes), values)
        of_second = "GradGrad" in op
        gradient = chance.numbers(values.shape if of_second else output.shape)
        inputs, plain = [values, output, gradient], [shard] * 3
        if not op.endswith("V2"):
            call = raw(op, padding=padding, **sizes)
            return Case(call, inputs, plain, ULPS, [shard])
        tensors = [_ints(*sizes[key]) for key in ("ksize", "strides")]
        call = raw(op, padding=padding)
        return Case(_with(tensors, call), inputs, plain, ULPS, [shard])

    return make


def _sized_pooling_gradient(
    op: str, forward: str, own: Sequence[int], sizes: dict[str, Any]
) -> Callable[[Chance], Case]:
    """Of ``forward``, for the sizes of its input and a gradient."""

    def make(chance: Chance) -> Case:
        padding = chance.of(PADDINGS)
        values, shard = _images(chance, own)
        output = _whole(raw(forward, padding=padding, **sizes), values)
        call = raw(op, padding=padding, **sizes)

        def with_sizes(gradient: Any) -> Any:
            return call(tf.constant(values.shape), gradient)

        return Case(with_sizes, [chance.numbers(output.shape)], [shard], ULPS, [shard])

    return make


def _convolution_gradient(
    op: str, of_filter: bool, given_as: str
) -> Callable[[Chance], Case]:
    """Of a convolution, for its input or its filter.

    The size of the result is that of a tensor, or given as a shape, of the result or
    of one image.
    """

    def make(chance: Chance) -> Case:
        dims = 3 if "3D" in op else 2
        padding, stride = chance.of(PADDINGS), chance.of((1, 2))
        sizes: dict[str, Any] = {"strides": [1, *[stride] * dims, 1]}
        dtype = chance.of((np.float16, *WIDE_FLOATS))
        if "Dilation" in op:
            dtype = chance.of(WIDE_FLOATS)
            sizes["rates"] = [1, chance.of((1, 2)), 1, 1]
        values, shard = _images(chance, [5] * dims + [2], dtype)
        filters = chance.numbers([3] * dims + [2, 3], dtype)
        forward = f"Conv{dims}D"
        if "Depthwise" in op:
            forward = "DepthwiseConv2dNative"
        if "Dilation" in op:
            forward, filters = "Dilation2D", filters[..., 0]
        output = _whole(raw(forward, padding=padding, **sizes), values, filters)
        gradient = chance.numbers(output.shape, dtype)
        call = raw(op, padding=padding, **sizes)
        if given_as == "tensor":
            inputs = [values, filters, gradient]
            target = SUM if of_filter else shard
            return Case(call, inputs, [shard, REPLICATE, shard], ULPS, [target])
        if of_filter:

            def by_filter(values: Any, gradient: Any) -> Any:
                return call(values, tf.constant(filters.shape), gradient)

            return Case(by_filter, [values, gradient], [shard, shard], ULPS, [SUM])
        shape = values.shape[1:-1] if given_as == "image" else values.shape

        def by_image(filters: Any, gradient: Any) -> Any:
            return call(tf.constant(shape), filters, gradient)

        return Case(by_image, [filters, gradient], [REPLICATE, shard], ULPS, [shard])

    return make


def _resizing_gradient(op: str) -> Callable[[Chance], Case]:
    def make(chance: Chance) -> Case:
        values, shard = _images(chance, (4, 3, 2))
        gradient = chance.numbers((shard.size, 5, 6, 2))
        inputs, plain = [gradient, values], [shard, shard]
        more: list[Array] = []
        if op == "ScaleAndTranslateGrad":
            more = [np.array([1.5, 0.5], np.float32), np.array([0.5, 0], np.float32)]
        return Case(_with(more, raw(op)), inputs, plain, ULPS, [shard])

    return make


_IMAGE, _VOLUME = (5, 4, 2), (3, 4, 3, 2)
GRADIENTS: dict[str, Callable[[Chance], Case]] = {
    **{
        op: _pooling_gradient(op, "MaxPool", _IMAGE, POOL)
        for op in ("MaxPoolGrad", "MaxPoolGradV2", "MaxPoolGradGrad")
    },
    "MaxPoolGradGradV2": _pooling_gradient(
        "MaxPoolGradGradV2", "MaxPool", _IMAGE, POOL
    ),
    **{
        op: _pooling_gradient(op, "MaxPool3D", _VOLUME, POOL_3D)
        for op in ("MaxPool3DGrad", "MaxPool3DGradGrad")
    },
    "AvgPoolGrad": _sized_pooling_gradient("AvgPoolGrad", "AvgPool", _IMAGE, POOL),
    "AvgPool3DGrad": _sized_pooling_gradient(
        "AvgPool3DGrad", "AvgPool3D", _VOLUME, POOL_3D
    ),
    **{
        op: _resizing_gradient(op)
        for op in ("ResizeBilinearGrad", "ResizeBicubicGrad", "ScaleAndTranslateGrad")
    },
    **{
        op: _convolution_gradient(op, True, "shape")
        for op in (
            *("Conv2DBackpropFilter", "Conv3DBackpropFilterV2"),
            "DepthwiseConv2dNativeBackpropFilter",
        )
    },
    "Dilation2DBackpropFilter": _convolution_gradient(
        "Dilation2DBackpropFilter", True, "tensor"
    ),
    **{
        op: _convolution_gradient(op, False, "shape")
        for op in (
            *("Conv2DBackpropInput", "Conv3DBackpropInputV2"),
            "DepthwiseConv2dNativeBackpropInput",
        )
    },
    "Dilation2DBackpropInput": _convolution_gradient(
        "Dilation2DBackpropInput", False, "tensor"
    ),
}
OTHERS = {
    *("ImageProjectiveTransformV2", "ImageProjectiveTransformV3", "CropAndResize"),
    *("BiasAdd", "BiasAddGrad"),
}


def test_every_op_has_a_case() -> None:
    assert {*ON_IMAGES, *GRADIENTS, *OTHERS, *BOXES} == ops_of(images)


@pytest.mark.parametrize("op", ON_IMAGES)
@given(seeds)
@few
def test_on_images(op: str, seed: int) -> None:
    check(ON_IMAGES[op], seed, others=2)


@pytest.mark.parametrize("op", GRADIENTS)
@given(seeds)
@few
def test_gradients(op: str, seed: int) -> None:
    check(GRADIENTS[op], seed, others=2)


@given(seeds)
@some
def test_gradient_whose_size_is_that_of_one_image(seed: int) -> None:
    check(_convolution_gradient("Conv2DBackpropInput", False, "image"), seed)


@given(seeds)
@some
def test_sizes_that_are_not_known(seed: int) -> None:
    chance = Chance(seed)
    values, shard = _images(chance, (4, 3, 2))
    case = Case(raw("ResizeBilinear"), [values, _ints(5, 6)], [])
    assert_close(run(case, [shard, REPLICATE], chance), ULPS)


@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize(
    "op", ["ImageProjectiveTransformV2", "ImageProjectiveTransformV3"]
)
@given(seeds)
@few
def test_projective_transform(op: str, each: bool, seed: int) -> None:
    """One transform for all rows, or one for each."""

    def make(chance: Chance) -> Case:
        values, shard = _images(chance, (4, 3, 2))
        count = shard.size if each else 1
        transforms = chance.numbers((count, 8), np.float32, -0.25, 0.25)
        transforms += np.array([1, 0, 0, 0, 1, 0, 0, 0], np.float32)
        of_transforms: Placement = shard if each else REPLICATE
        inputs, plain = [values, transforms], [shard, of_transforms]
        more = [_ints(3, 4), np.array(0.5, np.float32)]
        more = more if op.endswith("V3") else more[:1]
        call = raw(op, interpolation=chance.of(("NEAREST", "BILINEAR")))
        return Case(_with(more, call), inputs, plain, ULPS, [shard])

    check(make, seed, others=2)


@given(seeds)
@some
def test_crops(seed: int) -> None:
    """Boxes are divided, and may take any image."""

    def make(chance: Chance) -> Case:
        shard = chance.shard(0)
        inputs = [
            chance.numbers((4, 5, 5, 2)),
            chance.numbers((shard.size, 4), np.float32, 0, 1),
            chance.numbers((shard.size,), np.int32, 0, 3),
        ]
        call = _with([_ints(3, 2)], raw("CropAndResize"))
        return Case(call, inputs, [REPLICATE, shard, shard], ULPS, [shard])

    check(make, seed, others=2)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@given(seeds)
@some
def test_bias(layout: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch((1, 3))
        if layout == "NCHW" and len(shape) < 3:
            shape = (*shape, 2)
        channels = 1 if layout == "NCHW" else len(shape) - 1
        dtype = chance.of((*FLOATS, *INTEGERS))
        inputs = [
            chance.numbers(shape, dtype),
            chance.numbers((shape[channels],), dtype),
        ]
        of_bias: Placement = shard.at(0) if shard.dim == channels else REPLICATE
        call = raw("BiasAdd", data_format=layout)
        return Case(call, inputs, [shard, of_bias], 0, [shard])

    check(make, seed, others=3)


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@given(seeds)
@some
def test_gradient_of_a_bias(layout: str, seed: int) -> None:
    def make(chance: Chance) -> Case:
        shape, shard = chance.batch((1, 3))
        if layout == "NCHW" and len(shape) < 3:
            shape = (*shape, 2)
        channels = 1 if layout == "NCHW" else len(shape) - 1
        values = chance.numbers(shape, chance.of((*WIDE_FLOATS, *INTEGERS)))
        target = shard.at(0) if shard.dim == channels else SUM
        call = raw("BiasAddGrad", data_format=layout)
        return Case(call, [values], [shard], ULPS, [target])

    check(make, seed, others=2)


@given(seeds)
@few
def test_gradient_of_a_bias_of_terms(seed: int) -> None:
    def make(chance: Chance) -> Case:
        return Case(raw("BiasAddGrad"), [chance.numbers((3, 2))], [SUM], ULPS, [SUM])

    check(make, seed)


@given(seeds)
@few
def test_images_whose_rows_are_in_another_dimension(seed: int) -> None:
    """They are computed whole."""
    chance = Chance(seed)
    rows = chance.rows
    values = chance.numbers((2, rows + rows, 3, 2))
    pool = raw("MaxPool", padding="SAME", **POOL)
    filters = chance.numbers((2, 2, 2, 1))
    convolve = raw("Conv2D", padding="SAME", strides=[1, 1, 1, 1])
    placement = Shard(1, rows, 1, 2)
    for case in (
        Case(pool, [values], []),
        Case(lambda v: convolve(v, tf.constant(filters)), [values], []),
    ):
        assert_close(run(case, [placement], chance), ULPS)
