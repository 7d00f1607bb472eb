"""How much larger one gradient is than another. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tfcluster.runtime.collective.transport import Array


def growth(ours: Sequence[Array], chiefs: Sequence[Array]) -> float:
    """How much of the gradient ``chiefs`` there is in ``ours``; 0 where nobody can say.

    The factor by which the one comes closest to the other.
    """
    length = along = 0.0
    with np.errstate(all="ignore"):
        for one, other in zip(ours, chiefs, strict=True):
            wide = other.astype(np.float64).ravel()  # one at a time: they are large
            length += float(wide @ wide)
            along += float(one.astype(np.float64).ravel() @ wide)
    if not (length > 0.0 and math.isfinite(length) and math.isfinite(along)):
        return 0.0
    return along / length
