"""Half precision between ranks: two bytes on the wire, float32 in the sums.

Each rank sums up one part of the vector and rounds it once; so every rank sends
2 (N-1)/N of it, as it does around the ring, and all have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from tfcluster.runtime.collective.transports.base import (
    UFUNCS,
    Array,
    ReduceOp,
    Transport,
)


@cache
def is_half(dtype: Any) -> bool:
    """float16, or TensorFlow's bfloat16, which numpy knows by its name only.

    To ask for a dtype's name takes longer than anything else here.
    """
    return dtype.name in ("float16", "bfloat16")


def reduce_halves(
    transport: Transport, vector: Array, op: ReduceOp, shares: Sequence[float] | None
) -> Array:
    """A vector of float16 or bfloat16, of equal length on all ranks, combined.

    ``shares`` multiply the ranks' values, in float32; a rank of share 0 counts as
    zeros, whatever it has.
    """
    size = transport.size
    bounds = [len(vector) * part // size for part in range(size + 1)]
    bits = np.ascontiguousarray(vector).view(np.uint16)
    sent = [bits[bounds[p] : bounds[p + 1]].tobytes() for p in range(size)]
    received = transport.alltoall(sent)
    total: Array | None = None
    for rank, data in enumerate(received):
        part = np.frombuffer(data, np.uint16).view(vector.dtype).astype(np.float32)
        if shares is not None and shares[rank] == 0.0:
            part[:] = 0  # Not 0 * x: that could be NaN.
        elif shares is not None:
            part *= np.float32(shares[rank])
        total = part if total is None else UFUNCS[op](total, part)
    assert total is not None
    # What does not fit becomes infinite, as it does in TensorFlow.
    with np.errstate(over="ignore"):
        rounded = total.astype(vector.dtype)
    parts = transport.allgather(rounded.view(np.uint16).tobytes())
    return np.frombuffer(b"".join(parts), np.uint16).view(vector.dtype)
