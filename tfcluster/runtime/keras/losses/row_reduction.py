"""Finds how a number depends on the rows of a batch: as a mean, a sum, or otherwise.

It examines the operations of a graph, without running them. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

import tensorflow as tf

from tfcluster.runtime.tensor_types import Operation, Tensor


class Reduction(Enum):
    """How a number depends on the rows."""

    NOTHING = auto()
    """The number does not depend on the rows."""
    MEAN = auto()
    SUM = auto()
    """A sum of numbers computed from each row; also one number for each row."""
    COUNT = auto()
    """The number of rows, or a multiple of it."""
    UNKNOWN = auto()


_SAME = {
    "Cast",
    "CheckNumerics",
    "ConcatV2",
    "EnsureShape",
    "ExpandDims",
    "Identity",
    "Neg",
    "Pack",
    "PreventGradient",
    "Prod",
    "Reshape",
    "Snapshot",
    "Squeeze",
    "Transpose",
}
_ADDED = {"Add", "AddN", "AddV2", "Sub"}
_DIVIDED = {"Div", "DivNoNan", "RealDiv"}
_SIZES = {"Shape", "Size"}
_CONSTANT = {
    "Const",
    "Placeholder",
    "ReadVariableOp",
    "StopGradient",
    "VarHandleOp",
}


class Reductions:
    """Finds the reductions of the tensors of one graph."""

    def __init__(
        self, is_of_rows: Callable[[Tensor], bool], is_mean: Callable[[Tensor], bool]
    ) -> None:
        """``is_of_rows`` says whether a tensor's first axis is the axis of the rows.

        ``is_mean`` says whether a tensor is known to be a mean over the rows.
        """
        self._is_of_rows = is_of_rows
        self._is_mean = is_mean
        self._known: dict[str, Reduction] = {}

    def of(self, tensor: Tensor) -> Reduction:
        """The reduction of a tensor; ``SUM`` for a tensor with an axis of rows."""
        if self._is_mean(tensor):
            return Reduction.MEAN
        if tensor.dtype.is_floating and self._is_of_rows(tensor):
            return Reduction.SUM
        if tf.executing_eagerly():
            return Reduction.UNKNOWN
        name = str(tensor.name)
        if name not in self._known:
            self._known[name] = Reduction.UNKNOWN  # Also for a loop of operations.
            self._known[name] = self._of_operation(tensor.op)
        return self._known[name]

    def _of_operation(self, op: Operation) -> Reduction:
        kind, inputs = op.type, list(op.inputs)
        if kind in _CONSTANT:
            return Reduction.NOTHING
        if kind in _SIZES:
            counts = self._is_of_rows(inputs[0])
            return Reduction.COUNT if counts else Reduction.NOTHING
        if kind == "StridedSlice":
            return self._of_slice(inputs)
        if kind == "Mean":
            # A reduction over rows, since the result has no axis of rows.
            if self._is_of_rows(inputs[0]):
                return Reduction.MEAN
            return self.of(inputs[0])
        if kind in ("Sum", "L2Loss"):
            return self.of(inputs[0])
        found = [self.of(each) for each in inputs]
        depend = [each for each in found if each is not Reduction.NOTHING]
        if not depend:
            return Reduction.NOTHING
        if kind in _SAME or kind in _ADDED:
            return depend[0] if len({*depend}) == 1 else Reduction.UNKNOWN
        if kind == "Mul" and len(depend) == 1:
            return depend[0]
        if kind in _DIVIDED and found[1] is Reduction.NOTHING:
            return found[0]
        if kind in _DIVIDED and found == [Reduction.SUM, Reduction.COUNT]:
            return Reduction.MEAN
        if kind == "Maximum" and depend == [Reduction.COUNT]:
            return Reduction.COUNT
        return Reduction.UNKNOWN

    def _of_slice(self, inputs: list[Tensor]) -> Reduction:
        found = self.of(inputs[0])
        if found is not Reduction.COUNT:
            return found
        # The input is a shape: its first number is the number of rows.
        begin = tf.get_static_value(inputs[1])
        if begin is None or begin.size != 1:
            return Reduction.UNKNOWN
        return Reduction.COUNT if int(begin[0]) == 0 else Reduction.NOTHING
