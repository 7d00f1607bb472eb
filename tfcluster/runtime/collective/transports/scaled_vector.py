"""What a rank has to give to an all-reduce: a vector, and a factor for it.

To multiply on the way costs no more than to copy, and saves doing it beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tfcluster.runtime.collective.transports.base import Array


@dataclass(frozen=True, slots=True)
class Values:
    """``scale`` times ``vector``."""

    vector: Array
    scale: float = 1.0

    def write(self, start: int, end: int, room: Array) -> None:
        """Those from ``start`` to ``end``, into memory of that length."""
        if self.scale == 1.0:
            room[:] = self.vector[start:end]
        else:
            factor = room.dtype.type(self.scale)
            np.multiply(self.vector[start:end], factor, out=room)

    def read(self, start: int, end: int, room: Array) -> Array:
        """Those from ``start`` to ``end``, in ``room`` where they have to be made."""
        if self.scale != 1.0:
            self.write(start, end, room)
            return room
        return self.vector[start:end]
