"""Compares hosts' clocks with ours. They time nothing, but files bear their time."""

from __future__ import annotations

from collections.abc import Mapping

from tfcluster.host_patterns import fold

CLOCK_S = 1.0
"""A clock that is off by more than this is worth a warning."""


def certain_lead(there_s: float, asked_s: float, heard_s: float) -> float:
    """By how many seconds a clock is certainly ahead (negative: behind).

    It showed ``there_s`` at some time between ``asked_s`` and ``heard_s`` of our clock.
    When many hosts are asked at once, answers take long, and only large errors show.
    """
    return there_s - min(max(there_s, asked_s), heard_s)


def clock_warnings(leads_s: Mapping[str, float]) -> list[str]:
    """One line for all hosts whose clocks are off by the same number of seconds."""
    by_error: dict[int, list[str]] = {}
    for host, lead_s in leads_s.items():
        if abs(lead_s) > CLOCK_S:
            by_error.setdefault(round(lead_s), []).append(host)
    return [
        f"warning: clock of {fold(hosts)}: {error:+d} s from this machine's"
        for error, hosts in by_error.items()
    ]
