"""What a fuzz target is: a parser, its documented errors, and inputs to begin with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A parser of data from outside."""

    name: str
    run: Callable[[bytes], object]
    """Parse the input; an exception that is not in ``errors`` is a defect, and so is a
    property that does not hold (AssertionError)."""
    seeds: Callable[[], Sequence[bytes]]
    """Valid inputs, from which others are made."""
    errors: tuple[type[Exception], ...] = ()
    """The errors that the parser documents."""
    words: tuple[bytes, ...] = ()
    """Words that mean something to the parser."""
    most_bytes: int = 1 << 16
    """The length of the longest inputs."""
