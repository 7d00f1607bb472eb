"""Counts training steps and tells the agent how fast they go. Knows no TensorFlow."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tfcluster.runtime.telemetry.agent_channel import Reporter

_WINDOW_S = 1.0


class Waits(Protocol):
    """What knows how long this rank has waited for others."""

    @property
    def waited_s(self) -> float: ...


class Pace:
    """A step is one gradient of the optimizer that has had most of them."""

    def __init__(
        self,
        reporter: Reporter,
        waits: Waits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reporter = reporter
        self._waits = waits
        self._clock = clock
        self._steps: Counter[str] = Counter()
        self._window = _Window(clock(), 0, 0.0)
        self._is_first = True
        """The window is the first one, whose rate is told while it fills."""
        self._rates = (math.nan, math.nan)

    @property
    def steps(self) -> int:
        return max(self._steps.values(), default=0)

    def applied(self, optimizer: str) -> None:
        """``optimizer`` has got a gradient that all ranks have contributed to."""
        before = self.steps
        self._steps[optimizer] += 1
        if self.steps == before:
            return
        now = _Window(self._clock(), self.steps, self._waits.waited_s)
        if not before:
            # The first step has traced and compiled, and says nothing of the others.
            self._window = now
        elif (full := now.time_s - self._window.time_s >= _WINDOW_S) or self._is_first:
            self._rates = now.rates_since(self._window)
            if full:
                self._window, self._is_first = now, False
        self._reporter.step(self.steps, *self._rates)


@dataclass(frozen=True, slots=True)
class _Window:
    """Where a stretch of steps began."""

    time_s: float
    steps: int
    waited_s: float

    def rates_since(self, start: _Window) -> tuple[float, float]:
        """Steps per second, and the share of the time that was waited."""
        elapsed_s = max(self.time_s - start.time_s, 1e-9)
        waited = (self.waited_s - start.waited_s) / elapsed_s
        return (self.steps - start.steps) / elapsed_s, min(1.0, waited)
