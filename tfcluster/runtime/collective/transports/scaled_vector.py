"""A rank's contribution to an all-reduce: a vector and a factor.

Multiplying while the data are copied anyway costs nothing, and saves a separate pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tfcluster.runtime.collective.transports.base import Array


@dataclass(frozen=True, slots=True)
class ScaledVector:
    """``scale`` times ``vector``."""

    vector: Array
    scale: float = 1.0

    def write(self, start: int, end: int, room: Array) -> None:
        """Write the values from ``start`` to ``end`` into ``room``, of that length."""
        if self.scale == 1.0:
            room[:] = self.vector[start:end]
        else:
            factor = room.dtype.type(self.scale)
            np.multiply(self.vector[start:end], factor, out=room)

    def read(self, start: int, end: int, room: Array) -> Array:
        """The values from ``start`` to ``end``: a view, or scaled into ``room``."""
        if self.scale != 1.0:
            self.write(start, end, room)
            return room
        return self.vector[start:end]
