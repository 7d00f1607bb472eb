"""An exchange in progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tfcluster.runtime.collective.transports.hierarchical import HostTransport
from tfcluster.runtime.telemetry.tracer import EXCHANGES, Tracer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """An exchange in progress, on whose signature all ranks have agreed."""

    transport: HostTransport
    notes: tuple[bytes, ...] = ()
    """The note that each rank has sent along, in rank order: eight bytes."""
    tracer: Tracer | None = None
    how: str = ""
    """The transport's name, for the tracer."""

    def part(self, nbytes: int, act: Callable[[], T]) -> T:
        """Call ``act``, which transfers ``nbytes`` bytes of a rank: a bucket."""
        tracer = self.tracer
        if tracer is None:
            return act()
        began_s, waited_s = tracer.clock(), self.transport.waited_s
        result = act()
        ended_s, waited_s = tracer.clock(), self.transport.waited_s - waited_s
        tracer.add(EXCHANGES, "bucket", began_s, ended_s, nbytes, self.how, waited_s)
        return result
