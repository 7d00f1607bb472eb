"""Adasum: adds what is orthogonal in two gradients, and averages what is parallel.

Gradients of ranks that agree on a direction would be too large as a sum, and those that
don't too small as an average; Adasum lies in between. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfcluster.runtime.collective.transports.base import Array


def adasum(parts: Sequence[Array]) -> Array:
    """The ranks' arrays combined, in pairs of neighbours, then pairs of pairs.

    The same on every rank, as all compute it from the same arrays. Raises
    NotImplementedError where their number is no power of two.
    """
    if len(parts) & (len(parts) - 1):
        raise NotImplementedError(
            f"Adasum combines ranks in pairs: their number has to be a power of two, "
            f"not {len(parts)}"
        )
    dtype = parts[0].dtype
    wide = [part.astype(np.promote_types(dtype, np.float32)) for part in parts]
    while len(wide) > 1:
        wide = [_pair(*wide[i : i + 2]) for i in range(0, len(wide), 2)]
    return wide[0].astype(dtype)


def _pair(one: Array, other: Array) -> Array:
    a, b = one.reshape(-1).astype(np.float64), other.reshape(-1).astype(np.float64)
    common = float(a @ b)
    return (
        one * _share(common, float(a @ a)) + other * _share(common, float(b @ b))
    ).astype(one.dtype)


def _share(common: float, own: float) -> float:
    """How much of an array is left without half of what the other has of it, too."""
    return 1.0 - common / (2.0 * own) if own else 1.0
