"""Clocks of hosts against ours: nothing is timed by them, but files bear their time."""

from __future__ import annotations

from collections.abc import Mapping

from tfcluster.hostlist import fold

CLOCK_S = 1.0
"""What a clock may be off before anybody is told."""


def certain_lead(there_s: float, asked_s: float, heard_s: float) -> float:
    """By how much a clock is ahead at least, if it was read between these two times.

    Where many hosts are asked at once, answers take long: then only much is certain.
    """
    return there_s - min(max(there_s, asked_s), heard_s)


def clock_warnings(leads_s: Mapping[str, float]) -> list[str]:
    """A line for each error that hosts have in common, to the second."""
    by_error: dict[int, list[str]] = {}
    for host, lead_s in leads_s.items():
        if abs(lead_s) > CLOCK_S:
            by_error.setdefault(round(lead_s), []).append(host)
    return [
        f"warning: clock of {fold(hosts)}: {error:+d} s from this machine's"
        for error, hosts in by_error.items()
    ]
