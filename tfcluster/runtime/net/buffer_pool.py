"""A pool of arrays whose memory is reused once nothing refers to them any more.

Fresh memory costs a page fault for every 4 KiB, which takes longer than adding up the
numbers that are written to it. Arrays are aligned so that TensorFlow can use them as
tensors without a copy.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

from tfcluster.runtime.tensor_types import Array

ALIGNMENT = 64
"""Bytes; TensorFlow uses an array with this alignment without a copy."""
_MIN_BYTES = 1 << 16
_MAX_FREE = 4
_MAX_SIZES = 16
"""The number of recent sizes to keep: otherwise ever new sizes would exhaust memory."""


def _references(bases: list[Array]) -> list[int]:
    return [sys.getrefcount(base) for base in bases]


# getrefcount's own references differ between Python versions, so they are measured.
_UNUSED = _references([np.empty(0)])[0]
"""The reference count of a base to which only the pool refers; each array adds one."""


def _new_buffer(size: int) -> Array:
    return np.empty(size + ALIGNMENT, np.uint8)


class Pool:
    """A pool of reusable arrays; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bases: dict[int, list[Array]] = {}

    def empty(self, count: int, dtype: Any) -> Array:
        """An uninitialised vector of ``count`` items, aligned to ``ALIGNMENT`` bytes.

        It has shape (count,); ``dtype`` is anything that ``np.dtype`` accepts. Its
        memory is reused once nothing refers to it or to a view of it.
        """
        dtype = np.dtype(dtype)
        size = count * dtype.itemsize
        base = self._free(size) if size >= _MIN_BYTES else _new_buffer(size)
        if base is None:
            base = _new_buffer(size)
            with self._lock:
                self._bases.setdefault(size, []).append(base)
                while len(self._bases) > _MAX_SIZES:
                    del self._bases[next(iter(self._bases))]
        start = -base.ctypes.data % ALIGNMENT
        return base[start : start + size].view(dtype)

    def _free(self, size: int) -> Array | None:
        """An unused base of that size, or None; surplus unused bases are released."""
        with self._lock:
            bases = self._bases.pop(size, [])
            if bases:
                self._bases[size] = bases  # Now the most recently used size.
            counts = _references(bases)
            free = [
                base
                for base, count in zip(bases, counts, strict=True)
                if count <= _UNUSED
            ]
            for surplus in free[_MAX_FREE:]:
                self._bases[size] = [b for b in self._bases[size] if b is not surplus]
            return free[0] if free else None
