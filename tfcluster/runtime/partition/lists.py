"""What is known of TensorLists: the types of the values that ops on lists produce.

TensorFlow forgets the shapes of elements that a loop writes, and every value that a
list has held. Gradients of loops push shapes as well as data, so that both matter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from tfcluster.runtime.partition.graph import ListType, Node, Value
from tfcluster.runtime.partition.placement import Shape
from tfcluster.runtime.tensor_types import Array

ELEMENT_SHAPE_INPUT = {
    "TensorListGetItem": 2,
    "TensorListPopBack": 1,
    "TensorListStack": 1,
    "TensorListGather": 2,
}
"""The input with the elements' shape, of ops that read a list."""
NEW_LISTS = ("TensorListReserve", "EmptyTensorList")
_PASS = ("ZerosLike", "Identity", "AddN", "StopGradient", "IdentityN")


def set_types(node: Node) -> None:
    """Set ``Value.list`` of the outputs of a node that handles lists."""
    if node.type == "TensorListLength":
        known = node.inputs[0].list
        if known is not None and known.length is not None:
            node.outputs[0].constant = np.array(known.length, np.int32)
        return
    if node.outputs and node.outputs[0].is_handle:
        found = _type_of(node)
        if found is not None:
            node.outputs[0].list = found


def _type_of(node: Node) -> ListType | None:
    inputs = node.inputs
    if node.type in NEW_LISTS:
        length = 0 if node.type == "EmptyTensorList" else _integer(inputs[1])
        return ListType(node.attribute("element_dtype"), length=length)
    if node.type == "TensorListFromTensor":
        shape = inputs[0].shape
        if not shape:
            return ListType(inputs[0].dtype, begun=True)
        return ListType(inputs[0].dtype, shape[1:], shape[0], begun=True)
    known = inputs[0].list if inputs else None
    if known is None:
        return None
    if node.type == "TensorListSetItem":
        if node.attribute("resize_if_index_out_of_bounds"):
            known = replace(known, length=None)
        return with_element(known, inputs[2])
    if node.type == "TensorListPushBack":
        length = None if known.length is None else known.length + 1
        return with_element(replace(known, length=length), inputs[1])
    if node.type == "TensorListPopBack":
        return replace(known, length=None if not known.length else known.length - 1)
    if node.type == "TensorListResize":
        return replace(known, length=_integer(inputs[1]))
    if node.type in _PASS:
        # Zeros are of the same shapes, but not of the same values.
        found = joined(each.list for each in inputs)
        is_same = node.type in ("Identity", "StopGradient")
        return found if is_same or found is None else replace(found, constant=None)
    return ListType(known.dtype, begun=True) if _makes_list(node) else None


def _makes_list(node: Node) -> bool:
    return node.type.startswith("TensorList")


def with_element(known: ListType, value: Value) -> ListType:
    """The type of the list with an element more."""
    constant = None if value.is_handle else small_constant(value)
    if not known.begun:
        return replace(known, shape=value.shape, begun=True, constant=constant)
    return replace(
        known,
        shape=common_shape(known.shape, value.shape),
        constant=known.constant if _same(known.constant, constant) else None,
    )


def joined(types: Iterable[ListType | None]) -> ListType | None:
    """The type of a list that is one of several; None if one of them is unknown."""
    found: ListType | None = None
    for each in types:
        if each is None:
            return None
        found = each if found is None else _joined(found, each)
    return found


def _joined(first: ListType, second: ListType) -> ListType:
    length = first.length if first.length == second.length else None
    if not first.begun or not second.begun:
        begun = second if second.begun else first
        return replace(begun, length=length)
    return replace(
        first,
        shape=common_shape(first.shape, second.shape),
        length=length,
        constant=first.constant if _same(first.constant, second.constant) else None,
    )


def is_same(first: ListType | None, second: ListType | None) -> bool:
    """Whether two types are equal."""
    if first is None or second is None:
        return first is second
    return (
        (first.shape, first.length, first.begun)
        == (second.shape, second.length, second.begun)
        and (first.constant is None) == (second.constant is None)
        and (first.constant is None or _same(first.constant, second.constant))
    )


def common_shape(first: Shape | None, second: Shape | None) -> Shape | None:
    """The most specific shape that both shapes have."""
    if first is None or second is None or len(first) != len(second):
        return None
    return tuple(a if a == b else None for a, b in zip(first, second, strict=True))


def small_constant(value: Value) -> Array | None:
    """The constant of a value that may be a shape or an index."""
    if not (value.dtype.is_integer or value.dtype.is_bool):
        return None
    if value.shape is None or len(value.shape) > 1:
        return None
    found = value.constant
    return found if found is not None and found.size <= _SMALL else None


_SMALL = 8192


def _same(first: Array | None, second: Array | None) -> bool:
    return (
        first is not None
        and second is not None
        and first.dtype == second.dtype
        and np.array_equal(first, second)
    )


def _integer(value: Value) -> int | None:
    found = value.constant
    return None if found is None or found.size != 1 else int(found.reshape(-1)[0])
