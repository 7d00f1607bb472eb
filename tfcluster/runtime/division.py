"""Which rows of a global batch are whose. Pure."""

from __future__ import annotations


def bounds(batch: int, rank: int, size: int) -> tuple[int, int]:
    """First row of a rank's part of ``batch`` rows, and the row after its last."""
    return rank * batch // size, (rank + 1) * batch // size
