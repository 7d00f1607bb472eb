"""Rounds float32 to two bytes and back, averages what is sent so, keeps the errors.

Numbers below 6e-5, which are frequent in gradients, are subnormal in float16. numpy
takes ten times as long to round them as other numbers, but not if nothing is left to
round. So they are rounded before. Pure. The results have the same bits as numpy's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
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


def rounded_mean(
    vector: Array,
    own: int,
    size: int,
    rounding: Rounding,
    residual: Residual | None,
    swap: Callable[[Sequence[bytes]], Sequence[bytes]],
) -> None:
    """Average vectors of ``size`` ranks, which are sent in two bytes per number.

    ``vector`` has shape (n,) and dtype float32 or float64, equal on all ranks; it has
    the values of rank ``own``, and gets the mean, of the same bits on all ranks.
    ``swap`` sends a message to each rank, and returns what each has sent.

    Each rank gets one part of the vector from all others, averages it in float32,
    rounds it once, and sends it to all others (Rabenseifner's algorithm; Thakur et al.,
    "Optimization of Collective Communication Operations in MPICH", 2005). A ring would
    send the same number of bytes, but round every sum once for each rank.
    """
    bounds = [len(vector) * part // size for part in range(size + 1)]
    parts = list(pairwise(bounds))
    first, last = parts[own]
    with np.errstate(over="ignore", invalid="ignore"):
        values = vector.astype(np.float32, copy=False)
        sent = total = None
        if residual is not None:
            sent, total = residual.start(len(vector), last - first)
        half = rounding.empty(len(vector))
        back = pool.empty(len(vector), np.float32)
        for start, end in (bounds[0], first), (last, bounds[-1]):
            owed = None if sent is None else sent[start:end]
            _round_with(
                owed, values[start:end], half[start:end], back[start:end], rounding
            )
        data = half.view(np.uint8).data
        received = swap([data[2 * start : 2 * end].tobytes() for start, end in parts])
        mean, term = values[first:last].copy(), back[first:last]
        for rank, message in enumerate(received):
            if rank != own:
                rounding.to_float(_halves(message, half.dtype), term)
                mean += term
        mean /= size
        _round_with(total, mean, half[first:last], term, rounding)
    gathered = swap([half[first:last].view(np.uint8).tobytes()] * size)
    for (start, end), message in zip(parts, gathered, strict=True):
        rounding.to_float(_halves(message, half.dtype), back[start:end])
    vector[:] = back


def _round_with(
    owed: Array | None, values: Array, half: Array, back: Array, rounding: Rounding
) -> None:
    """Round values and what is owed to them; the rounding error is owed from then on.

    ``back`` is for float32 numbers on the way.
    """
    if owed is None:
        rounding.to_half(values, half)
        return
    owed += values
    rounding.to_half(owed, half)
    rounding.to_float(half, back)
    owed -= back
    # An infinite gradient must not stay forever.
    owed[~np.isfinite(owed)] = 0.0


def _halves(data: bytes, dtype: np.dtype[Any]) -> Array:
    return np.frombuffer(data, np.uint16).view(dtype)
