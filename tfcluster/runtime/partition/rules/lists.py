"""Ops on TensorLists, of which all elements have one placement."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfcluster.runtime.partition.graph import Node, elements_of
from tfcluster.runtime.partition.placement import (
    REPLICATE,
    ListOf,
    Placement,
    Replicate,
    Shape,
    Shard,
)
from tfcluster.runtime.partition.rules.table import (
    Build,
    LocalOps,
    LocalPlan,
    PlacedOp,
    rule,
)
from tfcluster.runtime.partition.writer import Ref

Element = Replicate | Shard


def handles_lists(node: Node) -> bool:
    """Whether the placement of a list that the node makes depends on its elements."""
    return node.type in ("TensorListReserve", "EmptyTensorList") or any(
        value.list is not None for value in (*node.inputs, *node.outputs)
    )


def _element(op: PlacedOp) -> Element:
    """The placement of the elements of the list, the first input."""
    placement = op.placements[0]
    element = placement.element if isinstance(placement, ListOf) else None
    return element or REPLICATE


def _of_any_shape(index: int) -> Build:
    """The op for elements of any shape, since they may be parts."""

    def build(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
        own_inputs = list(inputs)
        own_inputs[index] = local.constant(np.array(-1, np.int32))
        return local.repeat(node, own_inputs, shape_type=own_inputs[index].dtype)

    return build


def _of_shape(index: int, whole: Shape | None, element: Element) -> Build | None:
    """The op for elements that are parts of ``whole``, also those that are not set."""
    if whole is None:
        return None if element == REPLICATE else _of_any_shape(index)
    shape = whole

    def build(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
        sizes = local.split.local_shape(shape, element)
        own = np.array([-1 if size is None else size for size in sizes], np.int32)
        own_inputs = list(inputs)
        own_inputs[index] = local.constant(own.reshape(-1))
        return local.repeat(node, own_inputs)

    return build


@rule("TensorListReserve", "EmptyTensorList")
def new_list(op: PlacedOp) -> LocalPlan:
    want: list[Placement] = [REPLICATE] * len(op.inputs)
    return LocalPlan(want, [ListOf(None)], _of_any_shape(0))


@rule("TensorListFromTensor")
def from_tensor(op: PlacedOp) -> LocalPlan:
    shard = op.placements[0]
    if not isinstance(shard, Shard) or shard.dim == 0:
        return LocalPlan([REPLICATE, REPLICATE], [ListOf(REPLICATE)])
    element = shard.at(shard.dim - 1)
    return LocalPlan([shard, REPLICATE], [ListOf(element)], _of_any_shape(1))


@rule("TensorListSetItem", "TensorListPushBack")
def add_element(op: PlacedOp) -> LocalPlan:
    place = 2 if op.type == "TensorListSetItem" else 1
    list_placement = op.placements[0]
    before = list_placement.element if isinstance(list_placement, ListOf) else REPLICATE
    placement = op.placements[place]
    element: Element = placement if isinstance(placement, Shard) else REPLICATE
    if isinstance(element, Shard) and not _has_known_elements(op):
        element = REPLICATE
    if isinstance(before, Shard):
        element = before if element in (before, REPLICATE) else REPLICATE
    want: list[Placement] = [REPLICATE] * len(op.inputs)
    want[0], want[place] = ListOf(element), element
    return LocalPlan(want, [ListOf(element)])


def _has_known_elements(op: PlacedOp) -> bool:
    """Whether a divided list could be made whole, which takes its elements' shape."""
    list_type = op.outputs[0].list
    return list_type is not None and elements_of(list_type.shape) is not None


@rule("TensorListGetItem")
def get_element(op: PlacedOp) -> LocalPlan:
    element = _element(op)
    want: list[Placement] = [ListOf(element), REPLICATE, REPLICATE]
    return LocalPlan(want, [element], _of_shape(2, op.outputs[0].shape, element))


@rule("TensorListPopBack")
def pop_element(op: PlacedOp) -> LocalPlan:
    element = _element(op)
    build = _of_shape(1, op.outputs[1].shape, element)
    return LocalPlan([ListOf(element), REPLICATE], [ListOf(element), element], build)


@rule("TensorListStack")
def stack(op: PlacedOp) -> LocalPlan:
    element = _element(op)
    shape = op.outputs[0].shape
    target = element.at(element.dim + 1) if isinstance(element, Shard) else element
    build = _of_shape(1, None if shape is None else shape[1:], element)
    return LocalPlan([ListOf(element), REPLICATE], [target], build)


@rule("TensorListLength", "TensorListElementShape")
def length(op: PlacedOp) -> LocalPlan:
    if op.type == "TensorListElementShape":
        return LocalPlan([op.placements[0]], [REPLICATE], _unknown_shape)
    return LocalPlan([op.placements[0]], [REPLICATE])


def _unknown_shape(local: LocalOps, node: Node, inputs: Sequence[Ref]) -> Sequence[Ref]:
    dtype = node.outputs[0].dtype.as_numpy_dtype
    return [local.constant(np.array(-1, dtype))]


@rule("TensorListResize")
def resize(op: PlacedOp) -> LocalPlan:
    return LocalPlan([op.placements[0], REPLICATE], [op.placements[0]])
