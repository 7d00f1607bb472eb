"""Finds sparse gradients whose indices do not come from the rows of a batch.

An embedding of the positions in a row looks up 0, 1, 2, ..., whatever the rows are. All
ranks have the same indices, and so has one machine: see ``collective.sparse``. A column
of the batch may look the same, if by chance its rows are alike. So where a graph shows
how the indices are computed, it decides, together with the indices of all ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.collective.sparse import Slices, repeat_by_rows
from tfcluster.runtime.keras.state.derived_values import calls_functions, captured
from tfcluster.runtime.tensor_types import Operation, Tensor

_ITERATES = ("IteratorGetNext", "OptionalGetValue")
"""The beginnings of the types of ops that take elements of datasets."""


def may_be_common(indices: Tensor) -> bool:
    """Whether ``indices``, of shape (n,), may be the same whatever the rows are.

    In a graph: whether they are not computed from an argument of a function, such as
    the batch, except from the length of its rows. Eager tensors do not show how they
    were computed, nor do results of functions that the graph calls: they may be.
    """
    if tf_internals.is_eager(indices):
        return True
    waiting, seen = [indices], set()
    while waiting:
        tensor = waiting.pop()
        op: Operation = tensor.op
        place = (id(op), tensor.value_index)
        if place in seen or calls_functions(op) or _is_length(op, tensor.value_index):
            continue
        seen.add(place)
        if op.type.startswith(_ITERATES):
            return False
        if op.type == "Placeholder":
            outer = captured(op)
            if outer is None:
                return False
            if not tf_internals.is_eager(outer):
                waiting.append(outer)
        waiting += op.inputs
    return True


def _is_length(op: Operation, output: int) -> bool:
    """Whether an op takes dimensions from a shape, but not the first: the rows."""
    if op.type not in ("StridedSlice", "Unpack") or op.inputs[0].op.type != "Shape":
        return False
    if op.type == "Unpack":
        return output > 0
    begin, _, step = [tf.get_static_value(each) for each in op.inputs[1:]]
    rank = op.inputs[0].shape[0]
    masks = (op.get_attr("begin_mask"), op.get_attr("ellipsis_mask"))
    if begin is None or step is None or rank is None or any(masks) or step[0] < 0:
        return False
    return bool(np.where(begin < 0, begin + rank, begin)[0] > 0)


def marked(slices: Slices, rows: float, *, may_be_common: bool) -> Slices:
    """``slices`` of a rank with that many rows, marked if their indices are common."""
    found = may_be_common and not repeat_by_rows(slices.indices, rows)
    return replace(slices, common=found)
