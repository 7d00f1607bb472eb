"""Take some things out of a list, and put them back where they were. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

Placed = tuple[Sequence[T], Sequence[int]]
"""Values, and the position of each in the list that they are from."""


def split(
    values: Sequence[T], belongs: Callable[[T], bool]
) -> tuple[Placed[T], Placed[T]]:
    """Those that belong, and the others; both in order."""
    chosen = [i for i, value in enumerate(values) if belongs(value)]
    taken = set(chosen)
    others = [i for i in range(len(values)) if i not in taken]
    return (
        ([values[i] for i in chosen], chosen),
        ([values[i] for i in others], others),
    )


def stitch(parts: Sequence[Placed[T]]) -> list[T]:
    """The list that the parts were taken from.

    Raises ValueError where two values have one place, or a place has no value.
    """
    placed: dict[int, T] = {}
    for values, positions in parts:
        for value, position in zip(values, positions, strict=True):
            if position in placed:
                raise ValueError(f"two values are at position {position}")
            placed[position] = value
    if placed.keys() != set(range(len(placed))):
        raise ValueError("a position has no value")
    return [placed[position] for position in range(len(placed))]
