"""Judges how a loss combines the rows of a batch, from its values for the two halves.

A number for a batch does not show how it was computed. But a mean over the rows is the
weighted mean of the numbers for the halves, and a sum over the rows is the sum of these
numbers. Pure functions. The method is tfcluster's own.
"""

from __future__ import annotations

import numpy as np

from tfcluster.runtime.collective.transports.base import Array


def kind_of_loss(
    whole: float, halves: tuple[float, float], rows: int, tolerance: float
) -> str:
    """The kind of a loss, from its values for a batch and for the batch's halves.

    The first half has ``rows // 2`` rows; ``tolerance`` is relative. Returns 'mean',
    'sum', 'whole batch' or 'unknown'.
    """
    first, second = halves
    size = max(map(abs, (whole, *halves)))
    if rows < 2 or not 0.0 < size < float("inf"):
        return "unknown"
    half = rows // 2
    mean = (half * first + (rows - half) * second) / rows
    if abs(whole - mean) <= tolerance * size:
        return "mean"
    # A half whose rows are all masked has no loss, so it shows nothing.
    if first and second and abs(whole - (first + second)) <= tolerance * size:
        return "sum"
    return "whole batch"


def same_rows(whole: Array, parts: Array, tolerance: float) -> bool:
    """Whether the rows' values computed in two parts equal those of the whole batch.

    Both arrays have shape (rows, ...) and a real dtype; arrays of different shapes are
    not equal.
    ``tolerance`` is relative to the largest value. Values that are not finite are never
    reported as different.
    """
    if whole.shape != parts.shape:
        return False
    with np.errstate(all="ignore"):
        difference = np.abs(whole - parts)
        size = np.maximum(np.abs(whole), np.abs(parts)).max(initial=0.0)
    return bool(not np.isfinite(size)) or bool((difference <= tolerance * size).all())
