"""Ops on boxes in images, and on places in them; the rows are the first dimension."""

from __future__ import annotations

from tfcluster.runtime.partition.placement import SUM, Shard
from tfcluster.runtime.partition.rules.table import Operation, Plan, rule


def _by_rows(op: Operation, inputs: list[int]) -> Plan | None:
    shard = _rows(op, inputs)
    if shard is None:
        return None
    return Plan(op.want(inputs, shard), [shard] * len(op.outputs))


def _rows(op: Operation, inputs: list[int]) -> Shard | None:
    shard = op.first_shard(inputs)
    return shard if shard is not None and shard.dim == 0 else None


@rule("DrawBoundingBoxes", "DrawBoundingBoxesV2", "CombinedNonMaxSuppression")
def boxes_of_images(op: Operation) -> Plan | None:
    return _by_rows(op, [0, 1])


@rule("ExtractGlimpse", "ExtractGlimpseV2")
def glimpse(op: Operation) -> Plan | None:
    """A place in each image; with noise it is random."""
    if op.attribute("noise") != b"zero" and op.attribute("uniform_noise"):
        return None
    if op.attribute("noise") == b"gaussian":
        return None
    return _by_rows(op, [0, 2])


@rule("CropAndResizeGradImage")
def crop_gradient(op: Operation) -> Plan | None:
    """Boxes are divided, and each adds to its image."""
    shard = _rows(op, [0, 1, 2])
    return None if shard is None else Plan(op.want([0, 1, 2], shard), [SUM])


@rule("CropAndResizeGradBoxes")
def crop_gradient_of_boxes(op: Operation) -> Plan | None:
    """Boxes are divided; each may have been taken from any image."""
    return _by_rows(op, [0, 2, 3])


@rule("MaxPoolWithArgmax")
def pool_with_places(op: Operation) -> Plan | None:
    """Places are numbers within an image, unless the images are counted, too."""
    return None if op.attribute("include_batch_in_index") else _by_rows(op, [0])


@rule("MaxPoolGradWithArgmax", "MaxPoolGradGradWithArgmax")
def pool_gradient_with_places(op: Operation) -> Plan | None:
    if op.attribute("include_batch_in_index"):
        return None
    return _by_rows(op, [0, 1, 2])


@rule("LRNGrad")
def response_gradient(op: Operation) -> Plan | None:
    return _by_rows(op, [0, 1, 2])
