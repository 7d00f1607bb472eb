"""Converts arrays to dtypes that TensorFlow's collective ops support. Pure.

An unsupported dtype would not raise an error but end the process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tfcluster.runtime.collective.transports.base import Array, ReduceOp

_SUPPORTED = ("float32", "float64", "int32", "int64")
_WIDENED = {
    "int8": "int32",
    "int16": "int32",
    "uint8": "int32",
    "uint16": "int32",
    "uint32": "int64",
}
"""Dtypes to widen. Truncated again, sums and products have the bits of narrow ones."""
_VIEWED_AS = {"complex64": "float32", "complex128": "float64"}
"""A sum of pairs."""


@dataclass(frozen=True, slots=True)
class SupportedArray:
    """An array in a dtype that the ops support."""

    array: Array
    """A vector, in the same memory where nothing had to be converted."""
    converted: bool = False

    def store(self, result: Array, buffer: Array) -> None:
        """Convert the op's result for ``array`` back into the original buffer."""
        if self.converted:
            np.copyto(buffer, result, casting="unsafe")
        else:
            buffer[:] = result.view(buffer.dtype)


def to_supported(buffer: Array, op: ReduceOp) -> SupportedArray | None:
    """A contiguous vector in a supported dtype; None if ``op`` is not supported for it.

    MIN and MAX of floats are not supported, because numpy and TensorFlow treat NaN
    differently.
    """
    dtype: Any = buffer.dtype
    if not dtype.isnative or (dtype.kind == "f" and _orders(op)):
        return None
    if dtype.name in _SUPPORTED:
        return SupportedArray(buffer)
    if dtype.name in _WIDENED:
        return SupportedArray(buffer.astype(_WIDENED[dtype.name]), converted=True)
    if dtype.name in _VIEWED_AS and op is ReduceOp.SUM:
        return SupportedArray(buffer.view(_VIEWED_AS[dtype.name]))
    return None


def _orders(op: ReduceOp) -> bool:
    return op in (ReduceOp.MIN, ReduceOp.MAX)
