"""The ratio of one gradient to another, and their cosine similarity. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfcluster.runtime.collective.transports.base import Array


class GradientRatio(NamedTuple):
    """A gradient compared with a reference; zeros if they cannot be compared."""

    times: float
    """The least-squares factor s that minimises ``|ours - s * reference|``."""
    cosine: float
    """The cosine similarity; below 1 if random numbers differ."""


def gradient_ratio(ours: Sequence[Array], chiefs: Sequence[Array]) -> GradientRatio:
    """Compare the gradient ``ours`` with the reference ``chiefs``, in float64.

    Both have an array of the same shape for each variable.
    """
    length = along = own = 0.0
    with np.errstate(all="ignore"):
        for one, other in zip(ours, chiefs, strict=True):
            # One array at a time, because they are large.
            found = one.astype(np.float64).ravel()
            wide = other.astype(np.float64).ravel()
            own += float(found @ found)
            length += float(wide @ wide)
            along += float(found @ wide)
    if not (own > 0.0 and length > 0.0 and math.isfinite(own + length)):
        return GradientRatio(0.0, 0.0)
    return GradientRatio(along / length, along / math.sqrt(own * length))
