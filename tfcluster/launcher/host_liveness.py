"""How long each host has been silent, and when it counts as lost.

A host that answers on a new connection is given more time: TCP retransmits at growing
intervals, so data that was lost while a cable was loose may arrive up to ten seconds
after the cable was fixed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from tfcluster.base.light_dataclasses import dataclass
from tfcluster.launcher.agent_connection import HEARTBEAT_S, Answered
from tfcluster.plan.model import Host
from tfcluster.schedulers.starting import ANSWER_S, ReachabilityProbe, Starter

SILENCE_S = 15.0
"""A host that is silent for this long is lost; agents send every HEARTBEAT_S."""
ANSWERING_S = 25.0
"""Like SILENCE_S, for a host that answers on a new connection."""
DOUBT_S = SILENCE_S - ANSWER_S
"""After this silence a new connection is tried."""


@dataclass(slots=True)
class _Quiet:
    seconds: float = 0.0
    asked: bool = False
    answers: bool = False


class HostLiveness:
    """Counts silence. Other threads call ``post`` with the answers of silent hosts."""

    def __init__(self, starter: Starter, post: Callable[[Answered], None]) -> None:
        self._starter = starter
        self._post = post
        self._quiet: dict[str, _Quiet] = {}

    def heard(self, host: str, ago_s: float = 0.0) -> None:
        """Note that something came from a host, ``ago_s`` seconds ago."""
        if ago_s > DOUBT_S:
            self._quiet[host].seconds = ago_s  # a question asked since still counts
        else:
            self._quiet[host] = _Quiet(ago_s)

    def answered(self, item: Answered) -> None:
        if quiet := self._quiet.get(item.host):
            quiet.answers = quiet.asked and item.answers

    def elapsed(self, host: Host, seconds: float) -> float | None:
        """Add to a host's silence; returns the limit in seconds if it is exceeded."""
        quiet = self._quiet[host.name]
        quiet.seconds += seconds
        if quiet.seconds > DOUBT_S and not quiet.asked:
            quiet.asked = True
            probe(self._starter, host, self._post)
        limit_s = ANSWERING_S if quiet.answers else SILENCE_S
        return limit_s if quiet.seconds > limit_s else None

    def is_long(self, host: str) -> bool:
        """Whether a frame from the host is overdue."""
        quiet = self._quiet.get(host)
        return quiet is not None and quiet.seconds > 2 * HEARTBEAT_S


def probe(starter: Starter, host: Host, post: Callable[[Answered], None]) -> None:
    """Post, from a thread, whether a host answers, if the starter can find out."""
    if isinstance(starter, ReachabilityProbe):
        answers = starter.answers

        def ask() -> None:
            post(Answered(host.name, answers(host)))

        threading.Thread(target=ask, name=f"ask {host.name}", daemon=True).start()
