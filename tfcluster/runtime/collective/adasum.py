"""Adasum: adds orthogonal gradients, and averages parallel ones. Pure.

Where gradients agree on a direction their sum is too large a step, and where they are
orthogonal their average is too small; Adasum lies in between. See Maleki et al.,
"Scaling Distributed Training with Adaptive Summation", 2020 (arXiv:2006.02924).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfcluster.runtime.collective.transports.base import Array


def adasum(parts: Sequence[Array]) -> Array:
    """Combine the arrays of all ranks: neighbours in pairs, then pairs of pairs.

    ``parts`` are in rank order, floats of any shape, equal like the dtype; the result
    is a new array of that shape and dtype. Computed in float32 at least, dot products
    in float64. It is identical on all ranks, since each computes it from the same
    arrays. It is algorithm 1 of Maleki et al., arXiv:2006.02924, with the whole array
    as one layer. The number of ranks must be a power of two.
    """
    dtype = parts[0].dtype
    wide = [part.astype(np.promote_types(dtype, np.float32)) for part in parts]
    while len(wide) > 1:
        wide = [_pair(*wide[i : i + 2]) for i in range(0, len(wide), 2)]
    return wide[0].astype(dtype)


def require_power_of_two(ranks: int) -> None:
    """Raise NotImplementedError if Adasum cannot combine this number of ranks."""
    if ranks & (ranks - 1):
        raise NotImplementedError(
            "Adasum combines ranks in pairs: their number must be a power of two, not "
            f"{ranks}"
        )


def _pair(one: Array, other: Array) -> Array:
    a, b = one.reshape(-1).astype(np.float64), other.reshape(-1).astype(np.float64)
    common = float(a @ b)
    return (
        one * _share(common, float(a @ a)) + other * _share(common, float(b @ b))
    ).astype(one.dtype)


def _share(common: float, own: float) -> float:
    """The factor 1 - (a.b) / (2 a.a) of one vector in the combination of two."""
    return 1.0 - common / (2.0 * own) if own else 1.0
