"""The weighted mean of the gradients pushed for a step, summed in rank order. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tfcluster.runtime.collective.half_precision import is_half_precision
from tfcluster.runtime.collective.sparse import Slices, are_common
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.parameter_server.sharding import Gradient

_PORTION = 1 << 16
"""The number of items added at a time, so that they stay in a core's cache."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """The gradients that one rank has pushed, in the order of the pieces."""

    weight: float
    kinds: str
    gradients: Sequence[Gradient]


def difference(pushed: Mapping[int, Pushed]) -> str | None:
    """A sentence on how the kinds of the ranks' gradients differ; None if equal."""
    (first, expected), *others = sorted(pushed.items())
    for rank, other in others:
        for index, (a, b) in enumerate(zip(expected.kinds, other.kinds, strict=False)):
            if a != b:
                return (
                    f"rank {first} has {_WORDS[a]} for piece {index}, rank {rank} has "
                    f"{_WORDS[b]}"
                )
    return None


_WORDS = {"d": "an array", "s": "rows", "-": "no gradient"}


def mean(pushed: Mapping[int, Pushed]) -> list[Gradient]:
    """The weighted mean of each gradient; ranks of weight zero are ignored, even NaN.

    All ranks have the same kinds, shapes and dtypes (floats); the result keeps them.
    Half precision is summed in float32. Gradients may be overwritten. Sparse ones are
    scaled and concatenated in rank order, or added up if their indices are ``common``.
    Weights are numbers of rows: McMahan et
    al., arXiv:1602.05629.
    """
    ranks = sorted(pushed)
    total = sum(pushed[rank].weight for rank in ranks) or 1.0
    counting = [rank for rank in ranks if pushed[rank].weight] or ranks[:1]
    shares = [pushed[rank].weight / total for rank in counting]
    columns = zip(*(pushed[rank].gradients for rank in counting), strict=True)
    return [_mean(column, shares) for column in columns]


def _mean(column: Sequence[Gradient], shares: Sequence[float]) -> Gradient:
    first = column[0]
    if first is None:
        return None
    if isinstance(first, Slices):
        slices = [gradient for gradient in column if isinstance(gradient, Slices)]
        if are_common([s.indices for s in slices]):
            pairs = [p for p in zip(slices, shares, strict=True) if len(p[0].indices)]
            if all(s.common for s, _ in pairs):
                total = _weighted([s.values for s, _ in pairs], [p for _, p in pairs])
                return Slices(total, pairs[0][0].indices)
        values = [
            (s.values * np.float32(share)).astype(s.values.dtype, copy=False)
            for s, share in zip(slices, shares, strict=True)
        ]
        return Slices(
            np.concatenate(values), np.concatenate([s.indices for s in slices])
        )
    arrays = [array for array in column if isinstance(array, np.ndarray)]
    return _weighted(arrays, shares)


def _weighted(arrays: Sequence[Array], shares: Sequence[float]) -> Array:
    """The sum of the arrays, each times its share; may overwrite the first array."""
    dtype = arrays[0].dtype
    if len(arrays) == 1 and shares[0] == 1.0:
        return arrays[0]
    if is_half_precision(dtype):
        wide = [array.astype(np.float32) for array in arrays]
        return _weighted(wide, shares).astype(dtype)
    result = arrays[0]
    flats = [array.reshape(-1) for array in arrays]
    factors = [dtype.type(share) for share in shares]
    scratch = np.empty(min(_PORTION, len(flats[0])), dtype)
    for start in range(0, len(flats[0]), _PORTION):
        target = flats[0][start : start + _PORTION]
        target *= factors[0]
        for flat, factor in zip(flats[1:], factors[1:], strict=True):
            part = scratch[: len(target)]
            np.multiply(flat[start : start + _PORTION], factor, out=part)
            target += part
    return result
