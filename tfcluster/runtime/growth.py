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
    with np.errstate(all="ignore"):
        wide = [
            (one.astype(np.float64).ravel(), other.astype(np.float64).ravel())
            for one, other in zip(ours, chiefs, strict=True)
        ]
        length = sum(float(other @ other) for _, other in wide)
        along = sum(float(one @ other) for one, other in wide)
    if not (length > 0.0 and math.isfinite(length) and math.isfinite(along)):
        return 0.0
    return along / length
