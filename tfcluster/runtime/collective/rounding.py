"""Rounds float32 to two bytes and back, and keeps the errors.

Numbers below 6e-5, which are frequent in gradients, are subnormal in float16. numpy
takes ten times as long to round them as other numbers, but not if nothing is left to
round. So they are rounded before. Pure. The results have the same bits as numpy's.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfcluster.runtime.net.buffer_pool import Pool
from tfcluster.runtime.tensor_types import Array

pool = Pool()
"""The memory of numbers that are being converted; reused for the next bucket."""
_FLOAT16 = "float16"


@functools.cache
def is_half_precision(dtype: Any) -> bool:
    """Whether ``dtype``, a ``np.dtype``, is float16 or bfloat16.

    numpy knows bfloat16 only by its name. Cached, because ``dtype.name`` is slow
    compared with the rest of a small exchange.
    """
    return dtype.name in (_FLOAT16, "bfloat16")


_BLOCK = 1 << 16
"""Numbers to convert at once: the intermediate results stay in a core's cache."""
_HALF, _SMALLEST_NORMAL = np.float32(0.5), np.float32(2.0**-14)


def _to_float16(values: Array, out: Array) -> None:
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        rounded = np.abs(block)
        is_normal = rounded >= _SMALLEST_NORMAL
        # The last bit of 0.5 is that of the subnormal numbers of float16, 2**-24.
        rounded += _HALF
        rounded -= _HALF
        np.copysign(rounded, block, out=rounded)
        np.copyto(rounded, block, where=is_normal)
        np.copyto(out[start : start + _BLOCK], rounded, casting="unsafe")


@dataclass(frozen=True, slots=True)
class Rounding:
    """A two-byte dtype in which numbers are sent: float16 or bfloat16."""

    dtype: str

    def empty(self, count: int) -> Array:
        """An uninitialised array of that dtype, shape (count,)."""
        return pool.empty(count, _dtype(self.dtype))

    def to_half(self, values: Array, out: Array) -> None:
        """Round float32 ``values`` to ``out``; values out of range become infinite.

        Both are contiguous vectors of equal length.
        """
        with np.errstate(over="ignore", invalid="ignore"):  # A NaN stays a NaN.
            if self.dtype == _FLOAT16:
                _to_float16(values, out)
            else:
                np.copyto(out, values, casting="unsafe")

    def to_float(self, values: Array, out: Array) -> None:
        """Convert ``values`` to float32 ``out`` exactly; vectors of equal length."""
        np.copyto(out, values, casting="unsafe")


def _dtype(name: str) -> np.dtype[Any]:
    if name == _FLOAT16:
        return np.dtype(np.float16)
    import ml_dtypes  # TensorFlow needs this package, too.

    return np.dtype(ml_dtypes.bfloat16)


@dataclass(slots=True)
class Residual:
    """What this rank still owes to the sum of one vector: float32, or None for nothing.

    ``sent`` comes from rounding the values that it sends, and ``total`` from rounding
    the sums that it computes for all ranks.
    """

    sent: Array | None = None
    total: Array | None = None

    def start(self, sent: int, total: int) -> tuple[Array, Array]:
        """Both arrays, with these lengths; zeros at first and after a length change."""
        if self.sent is None or len(self.sent) != sent:
            self.sent = np.zeros(sent, np.float32)
        if self.total is None or len(self.total) != total:
            self.total = np.zeros(total, np.float32)
        return self.sent, self.total
