"""All-reduce of float16 and bfloat16: two bytes on the wire, sums in float32.

A reduce-scatter and an all-gather: each rank reduces one part of the vector and rounds
it once. So every rank sends 2 (N-1)/N of the vector, as in a ring, and all ranks get
the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from tfcluster.runtime.collective.rounding import Rounding
from tfcluster.runtime.collective.transports.base import (
    UFUNCS,
    Array,
    ReduceOp,
    Transport,
)


@cache
def is_half_precision(dtype: Any) -> bool:
    """Whether ``dtype``, a ``np.dtype``, is float16 or bfloat16.

    numpy knows bfloat16 only by its name. Cached, because ``dtype.name`` is slow
    compared with the rest of a small exchange.
    """
    return dtype.name in ("float16", "bfloat16")


def reduce_half_precision(
    transport: Transport, vector: Array, op: ReduceOp, divisor: int = 1
) -> Array:
    """All-reduce a float16 or bfloat16 vector, of equal length on all ranks.

    ``vector`` has shape (n,). ``op`` is one of ``UFUNCS``. The result is divided by
    ``divisor`` before it is rounded. Returns a new vector of the same length and dtype;
    values out of range become infinite. Raises what ``Transport.alltoall`` raises. The
    algorithm is Rabenseifner's (Thakur et al., "Optimization of Collective
    Communication Operations in MPICH", 2005), by direct exchange.
    """
    size = transport.size
    bounds = [len(vector) * part // size for part in range(size + 1)]
    bits = np.ascontiguousarray(vector).view(np.uint16)
    sent = [bits[bounds[p] : bounds[p + 1]].tobytes() for p in range(size)]
    received = transport.alltoall(sent)
    total: Array | None = None
    rounding = Rounding(vector.dtype.name)
    for data in received:
        values = np.frombuffer(data, np.uint16).view(vector.dtype)
        part = np.empty(len(values), np.float32)
        rounding.to_float(values, part)
        total = part if total is None else UFUNCS[op](total, part)
    assert total is not None
    if divisor != 1:
        total /= np.float32(divisor)
    # A value out of range becomes infinite, as in TensorFlow.
    rounded = rounding.empty(len(total))
    with np.errstate(over="ignore"):
        rounding.to_half(total, rounded)
    parts = transport.allgather(rounded.view(np.uint16).tobytes())
    return np.frombuffer(b"".join(parts), np.uint16).view(vector.dtype)
