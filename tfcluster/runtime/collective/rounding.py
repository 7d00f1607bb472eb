"""Rounds float32 to two bytes and back, and keeps the rounding errors.

float16 is converted by integer operations on whole arrays:
numpy converts one number at a time, and takes ten times as long for numbers below 6e-5,
which are frequent in gradients: these are subnormal in float16, and cause a processor
exception. Pure. The results have the same bits as numpy's, except for a NaN's payload.
"""

from __future__ import annotations

import functools
import threading
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
_DROPPED_BITS = 13
"""float32 has this many more mantissa bits."""
_ALL_BUT_SIGN = 0x7FFFFFFF
_INFINITY_32 = 0x7F800000
_REBIAS = 112 << 23
"""The difference of the exponents' biases, in place."""
_FIRST_NORMAL, _INFINITY, _NAN, _SIGN = 0x400, 0x7C00, 0x7E00, 0x8000
_HALF = np.float32(0.5)
_HALF_BITS = 0x3F000000
"""The last bit of 0.5 in float32 is 2**-24, the smallest float16. So adding 0.5 to a
number that is subnormal in float16 rounds it as float16 does, to even."""


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.magnitude = np.empty(_BLOCK, np.int32)
        self.normal = np.empty(_BLOCK, np.int32)
        self.subnormal = np.empty(_BLOCK, np.float32)


_scratch = _Scratch()


def to_float16(values: Array, out: Array) -> None:
    """Round float32 ``values`` to float16 ``out``, to nearest, ties to even.

    Both are contiguous vectors of equal length. Values above 65504 become infinite.
    """
    with np.errstate(invalid="ignore"):  # A NaN stays a NaN.
        for start in range(0, len(values), _BLOCK):
            _round(values[start : start + _BLOCK], out[start : start + _BLOCK])


def _round(values: Array, out: Array) -> None:
    count, bits = len(values), values.view(np.int32)
    magnitude = _scratch.magnitude[:count]
    normal = _scratch.normal[:count]
    sums = _scratch.subnormal[:count]
    subnormal = sums.view(np.int32)
    np.bitwise_and(bits, _ALL_BUT_SIGN, out=magnitude)
    # The bits of a normal number: half of the last bit is added, less 1 if it is even.
    np.right_shift(magnitude, _DROPPED_BITS, out=normal)
    np.bitwise_and(normal, 1, out=normal)
    np.add(normal, magnitude, out=normal)
    np.add(normal, 0xFFF - _REBIAS, out=normal)
    np.right_shift(normal, _DROPPED_BITS, out=normal)
    np.maximum(normal, _FIRST_NORMAL, out=normal)
    np.minimum(normal, _INFINITY, out=normal)
    # The bits of a subnormal number, less the first normal one; 0 for all others.
    np.add(magnitude.view(np.float32), _HALF, out=sums)
    np.subtract(subnormal, _HALF_BITS + _FIRST_NORMAL, out=subnormal)
    np.minimum(subnormal, 0, out=subnormal)
    np.add(normal, subnormal, out=normal)
    if magnitude.max() > _INFINITY_32:
        normal[magnitude > _INFINITY_32] = _NAN
    np.right_shift(bits, 16, out=magnitude)
    np.bitwise_and(magnitude, _SIGN, out=magnitude)
    np.bitwise_or(normal, magnitude, out=normal)
    np.copyto(out.view(np.uint16), normal, casting="unsafe")


@functools.cache
def _all() -> Array:
    """Every float16 as float32, by its bits; a quarter of a MiB."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def to_float32(values: Array, out: Array) -> None:
    """Convert float16 ``values`` to float32 ``out``, exactly; equal lengths."""
    # Every index is in range, and numpy checks none in this mode.
    np.take(_all(), values.view(np.uint16), out=out, mode="wrap")


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
        if self.dtype == _FLOAT16:
            to_float16(values, out)
        else:
            np.copyto(out, values, casting="unsafe")

    def to_float(self, values: Array, out: Array) -> None:
        """Convert ``values`` to float32 ``out`` exactly; vectors of equal length."""
        if self.dtype == _FLOAT16:
            to_float32(values, out)
        else:
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
