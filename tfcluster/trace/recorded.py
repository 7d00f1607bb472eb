"""A task's own trace events, as spans by the launcher's clock. Pure.

``docs/record.md`` ("Traces") describes the lines. Incomplete and invalid lines are left
out.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tfcluster.protocol.wire import loads
from tfcluster.trace.spans import Item, Moment, Span

_MUCH = 4.0
"""A measurement that is this many times less certain than the best one is not used."""
_GOOD_S = 0.001


@dataclass(frozen=True, slots=True)
class HostClock:
    """Ordered pairs of the host's clock and our offset from it, in microseconds."""

    points: tuple[tuple[float, float], ...]
    uncertainty_s: float

    def ours_us(self, theirs_us: int) -> int:
        """A time on the host's clock as a time on the launcher's clock (Unix time)."""
        return math.floor(theirs_us + self._offset_us(theirs_us))

    def _offset_us(self, theirs_us: int) -> float:
        """The offset at a time: clocks drift evenly between two measurements."""
        points = self.points
        after = bisect_right(points, (theirs_us, math.inf))
        if after == 0:
            return points[0][1]
        if after == len(points):
            return points[-1][1]
        (began, first), (ended, second) = points[after - 1], points[after]
        return first + (second - first) * (theirs_us - began) / (ended - began)


def host_clocks(events: Iterable[Mapping[str, Any]]) -> dict[str, HostClock]:
    """The clocks from a record's events of type ``clock``, by host."""
    measurements: dict[str, list[tuple[float, float, float]]] = {}
    for event in events:
        if event.get("type") != "clock":
            continue
        keys = ("monotonic_s", "offset_s", "uncertainty_s")
        measured = tuple(event.get(key) for key in keys)
        if all(isinstance(value, float) for value in measured):
            theirs_s, offset_s, uncertainty_s = map(float, measured)  # type: ignore[arg-type]  # checked above
            measurements.setdefault(str(event.get("host")), []).append(
                (theirs_s * 1e6, offset_s * 1e6, uncertainty_s)
            )
    return {host: _clock(measured) for host, measured in measurements.items()}


def _clock(measured: list[tuple[float, float, float]]) -> HostClock:
    best_s = min(uncertainty_s for _, _, uncertainty_s in measured)
    limit_s = max(best_s * _MUCH, _GOOD_S)
    used = [point for point in measured if point[2] <= limit_s]
    # By time: one measurement for each.
    points = {theirs: offset for theirs, offset, _ in used}
    return HostClock(
        tuple(sorted(points.items())), max(uncertainty for _, _, uncertainty in used)
    )


_STEPS = "steps"
_MOST = 1 << 53
"""Viewers read numbers as doubles, which are not exact above this."""


def recorded(lines: Iterable[bytes], clocks: dict[str, HostClock]) -> Iterator[Item]:
    """The items in a task's files, whose lines are in order, and the gaps in them."""
    expected: tuple[object, int] = None, 0
    for line in lines:
        try:
            batch = loads(line)
            attempt = batch["attempt"]
            first, last = _whole(batch["first"]), _whole(batch["last"])
            clock = clocks.get(batch["host"])
            items = [] if clock is None else list(_items(batch, clock))
            missing = first - expected[1] if expected[0] == attempt else 0
            expected = attempt, last + 1
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            continue
        if missing > 0 and items:
            at_us = items[0].began_us
            yield Moment(_STEPS, f"{missing} events are missing", at_us)
        yield from items


def _items(batch: dict[str, Any], clock: HostClock) -> Iterator[Span]:
    names, base_us = list(map(str, batch["names"])), batch["base_us"]
    for row, name, after_us, duration_us, *rest in loads(batch["events"].encode()):
        # An event that contains the first event began before it.
        began_us = _whole(base_us + after_us)
        yield Span(
            names[_whole(row)],
            names[_whole(name)],
            clock.ours_us(began_us),
            clock.ours_us(began_us + _whole(duration_us)),
            _args(names[row], names, *map(_whole, rest)),
        )


def _whole(value: Any) -> int:
    """``value`` if it is a number that a task may send. Raises ValueError."""
    if type(value) is not int or not 0 <= value < _MOST:
        raise ValueError(value)
    return value


def _args(
    row: str,
    names: list[str],
    amount: int = 0,
    how: int | None = None,
    waited_us: int = 0,
    arrived_us: int = 0,
) -> dict[str, object]:
    if how is None:
        key = "step" if row == _STEPS else "exchanges"
        return {key: amount} if amount else {}
    args: dict[str, object] = {"bytes": amount, "transport": names[how]}
    if arrived_us:
        args["arrived_ms"] = arrived_us / 1000
    args["waited_ms"] = waited_us / 1000
    return args
