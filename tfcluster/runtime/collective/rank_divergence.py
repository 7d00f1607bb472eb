"""Detects ranks whose models have diverged, and words the messages about it. Pure.

Ranks that average their gradients have bitwise equal weights as long as their programs
do the same. A program that makes decisions based on its rank's values breaks that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1e-4
"""Relative to an array's largest value. Hosts with different processors may round
differently: their weights differ by that much at most, and training does not amplify
it, since all ranks apply the same gradients."""
_SAME_NORM = 1e-6
_MASK = (1 << 64) - 1

ADVICE = (
    "A rank based a decision on values that differ between ranks: its rank, a clock, "
    "files of its host, random numbers without a seed. Use values that are equal on "
    "all ranks"
)

Array = NDArray[Any]


def checksum(array: Array) -> int:
    """The sum of the array's bytes as 64-bit words, modulo 2**64.

    ``array`` has any shape and dtype. The sum is an integer sum, which does not depend
    on the order of addition as a float sum would. The method is tfcluster's own; it
    detects accidents, not attacks.
    """
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    whole = data.size // 8 * 8
    with np.errstate(over="ignore"):
        total = int(np.add.reduce(data[:whole].view(np.uint64)))
    return (total + int.from_bytes(data[whole:].tobytes(), "little")) & _MASK


def text_of(value: Any) -> str:
    """A hyperparameter with six digits, so that rounding differences disappear.

    ``value`` is a number, or an array of one number.
    """
    number = float(value)
    if number.is_integer() and abs(number) < 1e15:
        return str(int(number))
    return f"{number:.6g}"


def by_rank(values: Mapping[int, str]) -> str:
    """``0.05 on rank 0, 2 and 0.1 on rank 1``."""
    ranks: dict[str, list[str]] = {}
    for rank, value in sorted(values.items()):
        ranks.setdefault(value, []).append(str(rank))
    return " and ".join(
        f"{value} on rank {', '.join(who)}" for value, who in ranks.items()
    )


def summary(arrays: Sequence[Array]) -> str:
    """A short summary of arrays: their checksum and their L2 norm.

    Arrays have any shapes and real dtypes. The text has 16 hexadecimal digits, a space
    and the norm.
    """
    total = sum(map(checksum, arrays)) & _MASK
    squares = sum(float(np.square(array.astype(np.float64)).sum()) for array in arrays)
    return f"{total:016x} {math.sqrt(squares):.9g}"


def differ_by_rounding(one: str, other: str) -> bool:
    """Whether two unequal summaries have norms that are equal up to rounding."""
    try:
        a, b = (float(text.split()[1]) for text in (one, other))
    except (IndexError, ValueError):
        return False
    if math.isnan(a) and math.isnan(b):
        return True
    return abs(a - b) <= _SAME_NORM * max(abs(a), abs(b))


@dataclass(frozen=True, slots=True)
class RankEnding:
    """The result of comparing the ranks' models at the end of their programs."""

    error: str | None = None
    warning: str | None = None


def compared_at_end(
    rank: int,
    ours: Mapping[str, str],
    others: Mapping[int, Mapping[str, str]],
    last_equal: Mapping[str, int],
) -> RankEnding:
    """Compare our model with the models of ranks that left before, label by label.

    Values are hyperparameters (``text_of``) or weights (``summary``). ``last_equal``
    has the step in which each label was last seen to be equal.
    """
    warning = None
    for label, value in ours.items():
        values = {
            other: theirs[label] for other, theirs in others.items() if label in theirs
        }
        unlike = {other: theirs for other, theirs in values.items() if theirs != value}
        if not unlike:
            continue
        if " " not in value:  # It is a number, not a summary.
            difference = f"the {label} is {by_rank({**values, rank: value})}"
        elif all(differ_by_rounding(value, theirs) for theirs in unlike.values()):
            warning = warning or (
                f"{label} differs between ranks by {ROUNDING:.1g} of its largest "
                "value: their processors round differently. The result is no longer "
                "bitwise equal on all ranks; the chief's result is used"
            )
            continue
        else:
            ranks = ", ".join(map(str, sorted(unlike)))
            difference = f"{label} differs between rank {rank} and rank {ranks}"
        step = last_equal.get(label, 0)
        before = (
            f"was the same in step {step}" if step else "was never seen to be equal"
        )
        return RankEnding(
            f"the ranks no longer train the same model: {difference} at the end of the "
            f"program; it {before}. {ADVICE}"
        )
    return RankEnding(warning=warning)
