"""The ratio of one gradient to another, and their cosine similarity. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfcluster.runtime.collective.transports.base import Array


class GradientRatio(NamedTuple):
    """What has become of a gradient; zeros where nobody can say."""

    times: float
    """By which it comes closest to what it was."""
    cosine: float
    """Of the angle between the two: 1 if they have one direction, less for chance."""


def growth(ours: Sequence[Array], chiefs: Sequence[Array]) -> GradientRatio:
    """How much of the gradient ``chiefs`` there is in ``ours``."""
    length = along = own = 0.0
    with np.errstate(all="ignore"):
        for one, other in zip(ours, chiefs, strict=True):
            # One array at a time: they are large.
            found = one.astype(np.float64).ravel()
            wide = other.astype(np.float64).ravel()
            own += float(found @ found)
            length += float(wide @ wide)
            along += float(found @ wide)
    if not (own > 0.0 and length > 0.0 and math.isfinite(own + length)):
        return GradientRatio(0.0, 0.0)
    return GradientRatio(along / length, along / math.sqrt(own * length))
