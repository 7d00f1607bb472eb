"""Compares hosts' clocks with ours.

No duration is measured with hosts' wall clocks, but files carry their times. Whatever
tasks record carries the time of their host's monotonic clock, which is measured again
and again.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfcluster.base.light_dataclasses import dataclass
from tfcluster.plan.host_patterns import fold

CLOCK_S = 1.0
"""A clock that is off by more than this is worth a warning."""


_LEAST_S = 0.001
"""A smaller change is not worth recording: events would move by less."""


@dataclass(frozen=True, slots=True)
class Measured:
    """At ``monotonic_s`` on a host, Unix time was ``offset_s`` ahead, in seconds."""

    monotonic_s: float
    offset_s: float
    uncertainty_s: float

    @classmethod
    def of(cls, monotonic_s: float, asked_s: float, heard_s: float) -> Measured:
        """The measurement from an answer: read in the middle, as NTP assumes."""
        half_s = max(0.0, heard_s - asked_s) / 2
        return cls(monotonic_s, asked_s + half_s - monotonic_s, half_s)

    def says_more_than(self, last: Measured | None) -> bool:
        """Whether it is much more certain than ``last``, or clocks have drifted."""
        if last is None or self.uncertainty_s < last.uncertainty_s / 2:
            return True
        moved_s = abs(self.offset_s - last.offset_s)
        return moved_s > max(self.uncertainty_s + last.uncertainty_s, _LEAST_S)


def certain_lead(there_s: float, asked_s: float, heard_s: float) -> float:
    """How far a clock that showed ``there_s`` meanwhile is ahead (behind: negative)."""
    return there_s - min(max(there_s, asked_s), heard_s)


def clock_warnings(leads_s: Mapping[str, float]) -> list[str]:
    by_error: dict[int, list[str]] = {}
    for host, lead_s in leads_s.items():
        if abs(lead_s) > CLOCK_S:
            by_error.setdefault(round(lead_s), []).append(host)
    return [
        f"warning: clock of {fold(hosts)}: {error:+d} s from this machine's"
        for error, hosts in by_error.items()
    ]
