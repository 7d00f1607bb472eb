"""Which variable, or which rows of it, lives on which ps. Pure.

Every training task computes it from the same list and comes to the same result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_SPLIT_FACTOR = 1 / 16
"""Of what is fair for a ps: smaller variables are not worth being split."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One trained variable of a model."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    item_bytes: int = 4
    rows_only: bool = False
    """A gradient of rows changes just those: only changed rows need to travel back."""

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``start`` to ``end`` of a variable."""

    variable: int
    """Its place in the model's list."""
    start: int
    end: int
    whole: bool
    """It is all of the variable."""


Placement = tuple[tuple[Piece, ...], ...]
"""The pieces of each ps, in the order of the variables."""
