"""Convolutions, pooling, boxes and other ops on images; dimension 0 are the rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfcluster.runtime.partition.graph import Node
from tfcluster.runtime.partition.placement import REPLICATE, SUM
from tfcluster.runtime.partition.rules.table import (
    LocalOps,
    LocalPlan,
    PlacedOp,
    Rule,
    by_rows,
    require,
    rule,
)
from tfcluster.runtime.partition.writer import Ref

rule(
    *("Conv", "Conv2D", "Conv3D", "DepthwiseConv2dNative", "Dilation2D"),
    *("MaxPool", "MaxPoolV2", "MaxPool3D", "AvgPool", "AvgPool3D"),
    *("DepthToSpace", "SpaceToDepth", "ExtractImagePatches", "ExtractVolumePatches"),
    *("ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea"),
    "ScaleAndTranslate",
)(by_rows(0))
rule(
    *("MaxPoolGrad", "MaxPoolGradV2", "MaxPoolGradGrad", "MaxPoolGradGradV2"),
    *("MaxPool3DGrad", "MaxPool3DGradGrad", "LRNGrad"),
)(by_rows(0, 1, 2))
rule("ResizeBilinearGrad", "ResizeBicubicGrad", "ScaleAndTranslateGrad")(by_rows(0, 1))
rule("Dilation2DBackpropInput")(by_rows(0, 2))
rule("ResizeNearestNeighborGrad")(by_rows(0))


@rule(
    *("Conv2DBackpropFilter", "Conv3DBackpropFilterV2", "Dilation2DBackpropFilter"),
    "DepthwiseConv2dNativeBackpropFilter",
)
def filter_gradient(op: PlacedOp) -> LocalPlan:
    """The gradient of a filter is a sum over all rows."""
    return LocalPlan(op.alike([0, 2], 1).want, [SUM])


def _input_gradient(sizes: int, image: int) -> Rule:
    """Input ``sizes`` has the shape of the result, or that of one image in it."""

    def gradient(op: PlacedOp) -> LocalPlan:
        shard, image_shape, shape = op.shard(image), op.shape(image), op.constant(sizes)
        require(shard.dim == 0)
        want = op.want([image], shard)
        if len(shape) == len(image_shape) - 2:
            return LocalPlan(want, [shard])

        def build(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
            own = [local.split.local_size(shard), *shape[1:]]
            own_inputs = list(inputs)
            own_inputs[sizes] = local.constant(np.array(own, shape.dtype))
            return local.repeat(node, own_inputs)

        return LocalPlan(want, [shard], build)

    return gradient


rule(
    *("Conv2DBackpropInput", "Conv3DBackpropInputV2"),
    "DepthwiseConv2dNativeBackpropInput",
)(_input_gradient(0, 2))
rule("AvgPoolGrad", "AvgPool3DGrad")(_input_gradient(0, 1))


@rule("ImageProjectiveTransformV2", "ImageProjectiveTransformV3")
def projective_transform(op: PlacedOp) -> LocalPlan:
    """One transform for all rows, or one for each."""
    transforms = op.shape(1)
    return op.alike([0] if transforms[0] == 1 else [0, 1], 1)


@rule("BiasAdd")
def bias_add(op: PlacedOp) -> LocalPlan:
    shard, shape = op.shard(), op.shape()
    is_channels = shard.dim == _channels(op, len(shape))
    return LocalPlan([shard, shard.at(0) if is_channels else REPLICATE], [shard])


@rule("BiasAddGrad", linear=0)
def bias_add_gradient(op: PlacedOp) -> LocalPlan:
    """A sum along all dimensions but the channels."""
    shard, shape = op.shard(), op.shape()
    is_channels = shard.dim == _channels(op, len(shape))
    return LocalPlan([shard], [shard.at(0) if is_channels else SUM])


def _channels(op: PlacedOp, rank: int) -> int:
    return 1 if op.attribute("data_format") == b"NCHW" else rank - 1


# Boxes are divided; each may take any image.
rule("CropAndResize")(by_rows(1, 2))
rule("CropAndResizeGradBoxes")(by_rows(0, 2, 3))
rule("DrawBoundingBoxes", "DrawBoundingBoxesV2", "CombinedNonMaxSuppression")(
    by_rows(0, 1)
)


@rule("CropAndResizeGradImage")
def crop_gradient(op: PlacedOp) -> LocalPlan:
    """Boxes are divided, and each adds to its image."""
    return LocalPlan(op.alike([0, 1, 2], 1).want, [SUM])


@rule("ExtractGlimpse", "ExtractGlimpseV2")
def glimpse(op: PlacedOp) -> LocalPlan:
    """A place in each image; with noise it is random."""
    noise = op.attribute("noise")
    require(
        noise != b"gaussian" and (noise == b"zero" or not op.attribute("uniform_noise"))
    )
    return op.alike([0, 2], 1)


@rule("MaxPoolWithArgmax", "MaxPoolGradWithArgmax", "MaxPoolGradGradWithArgmax")
def pool_with_places(op: PlacedOp) -> LocalPlan:
    """Places are numbers within an image, unless the images are counted, too."""
    require(not op.attribute("include_batch_in_index"))
    return op.alike(range(len(op.inputs)), 1)
