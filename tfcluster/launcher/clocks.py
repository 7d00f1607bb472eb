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
    """A host's monotonic clock compared with our clock, in seconds.

    When the host's clock showed ``monotonic_s``, ours (Unix time) was ``offset_s``
    ahead, give or take ``uncertainty_s``.
    """

    monotonic_s: float
    offset_s: float
    uncertainty_s: float

    @classmethod
    def of(cls, monotonic_s: float, asked_s: float, heard_s: float) -> Measured:
        """The measurement from an answer: the clock was read before we heard it.

        As in NTP, we assume that it was read in the middle.
        """
        half_s = max(0.0, heard_s - asked_s) / 2
        return cls(monotonic_s, asked_s + half_s - monotonic_s, half_s)

    def says_more_than(self, last: Measured | None) -> bool:
        """Whether this measurement must be recorded after ``last``.

        It must if it is much more certain, or if the clocks have drifted apart.
        """
        if last is None or self.uncertainty_s < last.uncertainty_s / 2:
            return True
        moved_s = abs(self.offset_s - last.offset_s)
        return moved_s > max(self.uncertainty_s + last.uncertainty_s, _LEAST_S)


def certain_lead(there_s: float, asked_s: float, heard_s: float) -> float:
    """How many seconds a clock is ahead for certain (negative: behind).

    It showed ``there_s`` at some time between ``asked_s`` and ``heard_s`` on our clock.
    When many hosts are asked at once, answers take long, and only large errors show.
    """
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
