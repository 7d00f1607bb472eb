"""Finds how an update depends on a variable's old value and on the batch. Pure.

A custom layer may count rows, sum, keep a maximum, or follow a mean. In each of these
cases, the ranks' values are combined differently. To find out which case it is, the
update is tested with other old values and with the two halves of a batch. The method is
tfcluster's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tfcluster.runtime.collective.transports.base import Array

CLOSE = 1e-3
ROUNDING = 1e-5
"""Tolerance of ``kind_of`` that allows only float32 rounding. A ratio of two sums can
be close to the mean of the halves' ratios."""
SHIFT = 1000.0
"""Amount added to an old value (relative to it, for floats); larger than the change by
one batch."""


@dataclass(frozen=True, slots=True)
class Kind:
    """``new = slope * old + rest``; ``how`` combines the ranks' rests."""

    how: str
    """mean (by rows), sum, max, min, chief, or other if it is none of these."""
    slope: float = 0.0
    running: bool = False
    """Whether it is the maximum or minimum of all batches, not just of the last one."""


@dataclass(frozen=True, slots=True)
class Trial:
    """New values of one variable, each computed from an old value and some rows."""

    rows: int
    shift: Array
    old: Array
    new: Array
    above: Array
    """From an old value increased by ``shift``; for ``below``, decreased by it."""
    below: Array
    first: Array
    """From the old value and the first half of the rows; ``second`` uses the other."""
    second: Array


def kind_of(trial: Trial, close: float = CLOSE) -> Kind | None:
    """The kind of an update; None if nothing has changed or there is only one row.

    ``close`` is how far the halves' values may be from the batch's values, relative to
    the largest value.

    The slope belongs to a linear fit through ``above``, ``new`` and ``below``.
    """
    old, new, above, below = (
        np.asarray(array, np.float64)
        for array in (trial.old, trial.new, trial.above, trial.below)
    )
    first, second = (np.asarray(a, np.float64) for a in (trial.first, trial.second))
    if trial.rows < 2 or np.array_equal(new, old):
        return None
    shift = np.asarray(trial.shift, np.float64)
    for how, combine, bound, other, moved in (
        ("max", np.maximum, below, above, old + shift),
        ("min", np.minimum, above, below, old - shift),
    ):
        is_extreme = _equal(new, combine(old, bound))
        if is_extreme and _equal(other, combine(moved, bound)) and _differ(other, new):
            if _equal(new, combine(first, second)):
                return Kind(how, running=True)
            return Kind("other")
    up, down = (above - new) / shift, (new - below) / shift
    slope = float(np.mean(up))
    if not (_is(up, slope) and _is(down, slope)):
        return Kind("other")
    for simple in (0.0, 1.0):
        slope = simple if abs(slope - simple) < CLOSE**2 else slope
    return Kind(
        _of_rests([a - slope * old for a in (new, first, second)], trial, close), slope
    )


def _of_rests(rests: Sequence[Array], trial: Trial, close: float) -> str:
    """How the rest of a batch is computed from the rests of its halves."""
    whole, first, second = rests
    if np.array_equal(whole, np.zeros_like(whole)):
        return "mean"
    half = trial.rows // 2
    size = max(float(np.abs(rest).max(initial=0.0)) for rest in rests)
    mean = (half * first + (trial.rows - half) * second) / trial.rows
    allowed = close * size + ROUNDING / 10 * float(np.abs(trial.old).max(initial=0.0))
    for how, expected in (
        ("mean", mean),
        ("sum", first + second),
        ("max", np.maximum(first, second)),
        ("min", np.minimum(first, second)),
    ):
        if np.abs(whole - expected).max(initial=0.0) <= allowed:
            return how
    return "other"


def _is(found: Array, expected: float) -> bool:
    return bool(np.all(np.abs(found - expected) <= CLOSE))


def _equal(one: Array, other: Array) -> bool:
    """Whether two arrays are equal up to float32 rounding."""
    return bool(np.allclose(one, other, rtol=1e-6, atol=0.0))


def _differ(one: Array, other: Array) -> bool:
    return not _equal(one, other)


def agreed(kinds: Sequence[Kind | None]) -> Kind | None:
    """The kind on which the ranks agree; some may have found out more than others."""
    known = [kind for kind in kinds if kind is not None]
    ways = {kind.how for kind in known}
    if not known:
        return None
    return known[0] if len(ways) == 1 else Kind("other", known[0].slope)
