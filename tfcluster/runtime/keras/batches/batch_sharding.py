"""Computes which rows of a global batch belong to which rank. Pure."""

from __future__ import annotations


def bounds(batch: int, rank: int, size: int) -> tuple[int, int]:
    """The first row of a rank's part of ``batch`` rows, and the row after its last.

    ``rank`` is below ``size``. The sizes of the ranks' parts differ by one row at most;
    a part may be empty.
    """
    return rank * batch // size, (rank + 1) * batch // size


def trial_bounds(batch: int, rank: int, size: int) -> tuple[int, int]:
    """Like ``bounds``, but rank 1 gets rank 0's rows, and the others share the rest.

    ``size`` is 2 or more.
    """
    return bounds(batch, max(0, rank - 1), size - 1)
