"""What a viewer draws: spans and moments, in rows of processes. Pure.

All times are in microseconds since the epoch, by the launcher's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time."""

    row: str
    name: str
    began_us: int
    ended_us: int
    args: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that took no time, or whose end is unknown."""

    row: str
    name: str
    at_us: int
    args: Mapping[str, object] = field(default_factory=dict)


Item = Span | Moment


@dataclass(frozen=True, slots=True)
class Process:
    """What a viewer shows together: the launcher, a host or a task."""

    name: str
    items: tuple[Item, ...]
    label: str = ""
    """Text beside the name."""


def lanes(spans: Iterable[Span]) -> Iterator[tuple[int, Span]]:
    """The spans of a row, sorted by beginning, each with the number of its lane.

    In a lane, two spans do not overlap, or one contains the other: viewers cannot draw
    anything else.
    """
    open_ends: list[list[int]] = []
    """For each lane, the ends of the spans that may contain the next span."""
    for span in sorted(spans, key=lambda each: (each.began_us, -each.ended_us)):
        for ends in open_ends:
            while ends and ends[-1] <= span.began_us:
                ends.pop()
        fitting = (
            number
            for number, ends in enumerate(open_ends)
            if not ends or span.ended_us <= ends[-1]
        )
        number = next(fitting, len(open_ends))
        if number == len(open_ends):
            open_ends.append([])
        open_ends[number].append(span.ended_us)
        yield number, span
