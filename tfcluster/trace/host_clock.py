"""Places the times of a host's monotonic clock on the launcher's clock. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

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
    found: dict[str, list[tuple[float, float, float]]] = {}
    for event in events:
        if event.get("type") != "clock":
            continue
        keys = ("monotonic_s", "offset_s", "uncertainty_s")
        measured = tuple(event.get(key) for key in keys)
        if all(isinstance(each, float) for each in measured):
            theirs_s, offset_s, uncertainty_s = map(float, measured)  # type: ignore[arg-type]  # checked above
            found.setdefault(str(event.get("host")), []).append(
                (theirs_s * 1e6, offset_s * 1e6, uncertainty_s)
            )
    return {host: _clock(measured) for host, measured in found.items()}


def _clock(measured: list[tuple[float, float, float]]) -> HostClock:
    best_s = min(uncertainty_s for _, _, uncertainty_s in measured)
    limit_s = max(best_s * _MUCH, _GOOD_S)
    used = [each for each in measured if each[2] <= limit_s]
    # By time: one measurement for each.
    points = {theirs: offset for theirs, offset, _ in used}
    return HostClock(
        tuple(sorted(points.items())), max(uncertainty for _, _, uncertainty in used)
    )
