"""Finds how a number that is computed from a batch scales with the number of rows.

This is a dimensional analysis of the graph: a sum over the rows scales with their
number (degree 1), a mean does not (degree 0), and the degree of a quotient is the
difference of two degrees. If an operation is not known, the degree is unknown. The
method is tfcluster's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras.checks.op_replay import Op, key_of
from tfcluster.runtime.tensor_types import Tensor

_KEEPS = {
    "Abs",
    "Cast",
    "CheckNumerics",
    "ExpandDims",
    "Identity",
    "Neg",
    "Reshape",
    "Squeeze",
    "StopGradient",
}
_ADDS = {"Add", "AddN", "AddV2", "Maximum", "Minimum", "SelectV2", "Sub"}
_MULTIPLIES = {"Mul", "MulNoNan"}
_DIVIDES = {"DivNoNan", "RealDiv"}
_POWERS = {"Rsqrt": -0.5, "Sqrt": 0.5, "Square": 2.0}
_REDUCES = {"Max": 0, "Mean": 0, "Min": 0, "Sum": 1}
"""How much the degree grows if the axis of the rows is reduced."""


@dataclass(frozen=True, slots=True)
class _RowDegree:
    degree: float | None
    """None if it is unknown."""
    by_row: bool
    """Whether the first axis is the axis of the rows."""
    is_shape: bool = False
    """Whether the tensor is the shape of a tensor that has rows."""
    held: bool = False
    """Whether the tensor is computed from all rows, so that it does not depend on how
    the batch is divided."""


_UNKNOWN = _RowDegree(None, by_row=False)
_HELD = _RowDegree(0.0, by_row=False, held=True)


def degree(
    ops: Iterable[Op], leaves: Sequence[Tensor], number: Tensor, rows: int | None
) -> float | None:
    """The degree of ``number``, computed by ``ops`` from ``leaves``, tensors with rows.

    ``rows`` is their number if it is a constant of the graph. Returns None if the
    degree is unknown. Raises KeyError if the number does not depend on ``leaves``.
    """
    degrees = {key_of(leaf): _RowDegree(0.0, by_row=True) for leaf in leaves}
    for op in ops:
        inputs = [degrees.get(key_of(tensor)) for tensor in op.inputs]
        if any(found is not None for found in inputs):
            for output in op.outputs:
                known = [each for each in inputs if each is not None]
                if op.held or all(each.held for each in known):
                    found = _HELD
                else:
                    found = _of(op, inputs, output, rows)
                degrees.setdefault(key_of(output), found)
    return degrees[key_of(number)].degree


def _of(
    op: Op, inputs: Sequence[_RowDegree | None], output: Tensor, rows: int | None
) -> _RowDegree:
    """The degree of an output; None in ``inputs`` means independent of the batch."""
    dependent = [found for found in inputs if found is not None]
    first = inputs[0]
    rank = output.shape.rank
    by_row = any(found.by_row for found in dependent) and rank != 0
    degrees = [found.degree for found in dependent]
    if op.kind == "Shape":
        return _RowDegree(0.0, by_row=False, is_shape=bool(first and first.by_row))
    if op.kind == "Size" and first is not None and first.by_row:
        return _RowDegree(1.0, by_row=False)
    if any(found.is_shape for found in dependent):
        return _of_shape(op, rank)
    if None in degrees or (by_row and _moves_rows(op, dependent)):
        return _UNKNOWN
    if op.kind in _REDUCES and first is not None:
        return _reduced(op, first, rank)
    found: float | None = None
    if op.kind in _KEEPS or op.kind in _ADDS:
        found = degrees[0] if len(set(degrees)) == 1 else None
    elif op.kind in _MULTIPLIES:
        found = sum(value for value in degrees if value is not None)
        for tensor, one in zip(op.inputs, inputs, strict=True):
            if one is None:
                factor = _of_factor(tensor, rows, 1)
                found = None if factor is None or found is None else found + factor
    elif op.kind in _DIVIDES:
        above, below = (one.degree or 0.0 if one else 0.0 for one in inputs)
        found = above - below
        if inputs[1] is None:
            factor = _of_factor(op.inputs[1], rows, -1)
            found = None if factor is None else found + factor
    elif op.kind in _POWERS and first is not None and first.degree is not None:
        found = first.degree * _POWERS[op.kind]
    elif set(degrees) == {0.0} and by_row:
        found = 0.0  # One number per row, as far as one can tell.
    return _RowDegree(found, by_row=by_row)


def _moves_rows(op: Op, dependent: Sequence[_RowDegree]) -> bool:
    """Whether the first axis may no longer be the axis of the rows."""
    if op.kind == "Transpose":
        order = _constant(op.inputs[1])
        return order is None or order[0] != 0
    return op.kind == "MatMul" and len(dependent) > 1


def _of_factor(tensor: Tensor, rows: int | None, power: int) -> float | None:
    """The degree of a factor that is the same for all batches with ``rows`` rows.

    If the number of rows is a constant of the graph, so is everything computed from it.
    ``power`` is -1 for a divisor.
    """
    if rows is None:
        return 0.0
    value = tf.get_static_value(tensor)
    if value is None or np.ndim(value):
        return None
    if not value or not np.isfinite(value):
        return 0.0
    size = float(value) ** power
    times = size * rows
    made_of_rows = 0.0 < size < 1.0 and abs(times * round(1 / times) - 1) < 1e-5
    return -1.0 if made_of_rows else 0.0


def _of_shape(op: Op, rank: int | None) -> _RowDegree:
    """The degree of a shape's element: only the first, the number of rows, grows."""
    if op.kind == "StridedSlice" and rank == 0:
        begin = _constant(op.inputs[1])
        if begin is not None:
            return _RowDegree(1.0 if int(begin[0]) == 0 else 0.0, by_row=False)
    if op.kind in ("Prod", "Size"):
        return _RowDegree(1.0 if op.kind == "Prod" else 0.0, by_row=False)
    if op.kind == "Reshape":
        return _RowDegree(0.0, by_row=rank != 0)
    return _UNKNOWN


def _reduced(op: Op, first: _RowDegree, rank: int | None) -> _RowDegree:
    axes = _constant(op.inputs[1])
    before = op.inputs[0].shape.rank
    if axes is None or first.degree is None:
        return _UNKNOWN
    over_rows = first.by_row and (
        0 in axes or (before is not None and -before in axes) or rank == 0
    )
    grows = _REDUCES[op.kind] if over_rows else 0
    return _RowDegree(first.degree + grows, by_row=first.by_row and not over_rows)


def _constant(tensor: Tensor) -> Array | None:
    """The value of a constant of the graph, with at least one dimension."""
    value = tf.get_static_value(tensor)
    return None if value is None else np.atleast_1d(value)
