"""Convolutions, pooling and other ops on images, whose first dimension are the rows."""

from __future__ import annotations

from collections.abc import Sequence

from tfcluster.runtime.partition.graph import Node, as_vector
from tfcluster.runtime.partition.placement import REPLICATE, SUM, Shard
from tfcluster.runtime.partition.rules.table import (
    Local,
    Operation,
    Plan,
    Rule,
    rule,
)
from tfcluster.runtime.partition.writer import Ref


def _by_rows(op: Operation, inputs: Sequence[int]) -> Shard | None:
    """The placement if the rows are the first dimension of these inputs."""
    shard = op.first_shard(inputs)
    return None if shard is None or shard.dim != 0 else shard


def _images(inputs: Sequence[int]) -> Rule:
    """These inputs and the outputs are images; other inputs are whole."""

    def by_rows(op: Operation) -> Plan | None:
        shard = _by_rows(op, inputs)
        if shard is None:
            return None
        return Plan(op.want(inputs, shard), [shard] * len(op.outputs))

    return by_rows


rule(
    *("Conv", "Conv2D", "Conv3D", "DepthwiseConv2dNative", "Dilation2D"),
    *("MaxPool", "MaxPoolV2", "MaxPool3D", "AvgPool", "AvgPool3D"),
    *("DepthToSpace", "SpaceToDepth", "ExtractImagePatches", "ExtractVolumePatches"),
    *("ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea"),
    "ScaleAndTranslate",
)(_images([0]))
rule(
    *("MaxPoolGrad", "MaxPoolGradV2", "MaxPoolGradGrad", "MaxPoolGradGradV2"),
    *("MaxPool3DGrad", "MaxPool3DGradGrad"),
)(_images([0, 1, 2]))
rule("ResizeBilinearGrad", "ResizeBicubicGrad", "ScaleAndTranslateGrad")(
    _images([0, 1])
)
rule("Dilation2DBackpropInput")(_images([0, 2]))
rule("ResizeNearestNeighborGrad")(_images([0]))


def _filter_gradient(inputs: Sequence[int]) -> Rule:
    """The gradient of a filter is a sum over all rows."""

    def by_rows(op: Operation) -> Plan | None:
        shard = _by_rows(op, inputs)
        return None if shard is None else Plan(op.want(inputs, shard), [SUM])

    return by_rows


rule(
    *("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "Dilation2DBackpropFilter"),
    "DepthwiseConv2dNativeBackpropFilter",
)(_filter_gradient([0, 2]))


def _input_gradient(sizes: int, image: int) -> Rule:
    """Input ``sizes`` has the shape of the result, or that of one image in it."""

    def by_rows(op: Operation) -> Plan | None:
        shard, known = _by_rows(op, [image]), op.shape(image)
        shape = op.constant(sizes)
        if shard is None or known is None or shape is None:
            return None
        want = op.want([image], shard)
        if len(shape) == len(known) - 2:
            return Plan(want, [shard])

        def build(local: Local, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
            own = [local.split.local_size(shard), *shape[1:]]
            given = list(inputs)
            given[sizes] = local.constant(as_vector(own, shape))
            return local.repeat(node, given)

        return Plan(want, [shard], build)

    return by_rows


rule(
    *("Conv2DBackpropInput", "Conv3DBackpropInputV2"),
    "DepthwiseConv2dNativeBackpropInput",
)(_input_gradient(0, 2))
rule("AvgPoolGrad", "AvgPool3DGrad")(_input_gradient(0, 1))


@rule("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def projective_transform(op: Operation) -> Plan | None:
    """One transform for all rows, or one for each."""
    shard, transforms = _by_rows(op, [0, 1]), op.shape(1)
    if shard is None or transforms is None:
        return None
    if transforms[0] == 1:
        return Plan(op.want([0], shard), [shard])
    return Plan(op.want([0, 1], shard), [shard])


@rule("CropAndResize")
def crop_and_resize(op: Operation) -> Plan | None:
    """Boxes are divided; each may take any image."""
    shard = _by_rows(op, [1, 2])
    if shard is None:
        return None
    return Plan(op.want([1, 2], shard), [shard])


@rule("BiasAdd")
def bias_add(op: Operation) -> Plan | None:
    shard, shape = op.shard(), op.shape()
    if shard is None or shape is None:
        return None
    is_channels = shard.dim == _channels(op, len(shape))
    return Plan([shard, shard.at(0) if is_channels else REPLICATE], [shard])


@rule("BiasAddGrad")
def bias_add_gradient(op: Operation) -> Plan | None:
    """A sum along all dimensions but the channels."""
    if op.placements[0] == SUM:
        return Plan([SUM], [SUM])
    shard, shape = op.shard(), op.shape()
    if shard is None or shape is None:
        return None
    is_channels = shard.dim == _channels(op, len(shape))
    return Plan([shard], [shard.at(0) if is_channels else SUM])


def _channels(op: Operation, rank: int) -> int:
    return 1 if op.attribute("data_format") == b"NCHW" else rank - 1
