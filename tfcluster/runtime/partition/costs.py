"""The work of ops, as far as their shapes say it: to compare one with another."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tfcluster.runtime.partition.functions import LOOPS
from tfcluster.runtime.partition.graph import Node, Value, sizes_of

_FREE = frozenset(
    (
        *("Const", "Placeholder", "NoOp", "Identity", "IdentityN", "Snapshot"),
        *("StopGradient", "PreventGradient", "CheckNumerics", "EnsureShape"),
        *("ReadVariableOp", "VarHandleOp", "VariableShape", "DisableCopyOnRead"),
        *("Reshape", "Squeeze", "ExpandDims", "Shape", "ShapeN", "Size", "Rank"),
        *("Assert", "IteratorGetNext", "FakeParam", "TensorListReserve"),
        *("EmptyTensorList", "TensorListLength", "TensorListElementShape"),
    )
)
"""Ops that compute no numbers."""
_FILTERS = {
    **dict.fromkeys(("Conv2D", "Conv3D", "Conv", "DepthwiseConv2dNative"), 1),
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2"), 1),
    "DepthwiseConv2dNativeBackpropInput": 1,
}
"""The input that is the filter."""
_FILTER_GRADIENTS = frozenset(
    (
        *("Conv2DBackpropFilter", "Conv3DBackpropFilterV2"),
        "DepthwiseConv2dNativeBackpropFilter",
    )
)
_PRODUCTS = ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")


def cost_of(node: Node) -> int:
    """The work of a node, to compare it with others, without the bodies of loops.

    Multiply-adds of products and convolutions, else the number of elements of its
    largest input or output. Sizes that are unknown count as 1.
    """
    if node.is_folded or node.bodies or node.type in _FREE:
        return 0
    if node.type in _PRODUCTS:
        return _of_product(node)
    if node.type == "Einsum":
        cost = _of_einsum(node)
        if cost is not None:
            return cost
    if node.type in _FILTERS or node.type in _FILTER_GRADIENTS:
        return _of_convolution(node)
    return max(map(_count, (*node.inputs, *node.outputs)), default=0)


def rounds_of(node: Node) -> int:
    """How often the body of a loop runs, as far as that is known, else 1.

    Known is the most rounds that the program allows, or the length of a list that the
    loop reads or writes.
    """
    if node.type not in LOOPS:
        return 1
    # A loop begins with its counter and the most rounds, which is -1 for no limit.
    if len(node.inputs) > 1 and node.inputs[1].shape == ():
        most = node.inputs[1].constant
        if most is not None and most.dtype.kind == "i" and int(most) > 0:
            return int(most)
    values = (*node.inputs, *node.outputs)
    lengths = [
        value.list.length
        for value in values
        if value.list is not None and value.list.length is not None
    ]
    return max(1, *lengths) if lengths else 1


def _of_product(node: Node) -> int:
    shape = node.inputs[0].shape
    if shape is None or len(shape) < 2:
        return _count(node.outputs[0])
    transposed = node.attribute("transpose_a") or node.attribute("adj_x")
    inner = shape[-2] if transposed else shape[-1]
    return _count(node.outputs[0]) * (inner or 1)


def _of_einsum(node: Node) -> int | None:
    """None for an equation with an ellipsis, or sizes that are unknown."""
    equation = node.attribute("equation").decode()
    labels = equation.partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, value in zip(labels, node.inputs, strict=False):
        shape = sizes_of(value.shape)
        if shape is None or len(shape) != len(term) or "." in term:
            return None
        sizes.update(zip(term, shape, strict=True))
    return math.prod(sizes.values())


def _of_convolution(node: Node) -> int:
    """For each output (or its gradient), as many as the filter has per channel."""
    if node.type in _FILTER_GRADIENTS:
        taken, weights = node.inputs[2], node.outputs[0]
    elif node.type.partition("Backprop")[1]:
        taken, weights = node.inputs[2], node.inputs[1]
    else:
        taken, weights = node.outputs[0], node.inputs[_FILTERS[node.type]]
    shape = weights.shape or ()
    # A depthwise filter has [..., channels, multiplier], others [..., in, out].
    inner = shape[:-2] if node.type.startswith("Depthwise") else shape[:-1]
    return _count(taken) * _product(inner)


def _count(value: Value) -> int:
    if value.is_handle:
        return 0
    return _product(value.shape or ())


def _product(sizes: Sequence[int | None]) -> int:
    return math.prod(1 if size is None else size for size in sizes)
