"""Counts training steps and exchanges, and reports them, without TensorFlow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tfcluster.protocol.task_events import ExchangeTotal
from tfcluster.runtime.telemetry.agent_channel import Reporter
from tfcluster.runtime.telemetry.tracer import Tracer

_WINDOW_S = 1.0
_MOST_TOTALS = 12
_MOST_KINDS = 64
_OTHERS = "others"


@dataclass(slots=True)
class Total:
    """The cost so far of the exchanges with one purpose."""

    count: int = 0
    seconds: float = 0.0
    """Including the time in which this rank waited for others."""
    bytes: int = 0
    """The bytes that this rank has contributed."""


class ExchangeTotals:
    """The totals of one rank, by the purpose of the exchanges.

    One thread adds at a time; another may read.
    """

    def __init__(self) -> None:
        self._totals: dict[str, Total] = {}

    def add(self, what: str, seconds: float, nbytes: int) -> None:
        """Count an exchange. Purposes after the first 64 count as "others"."""
        total = self._totals.get(what)
        if total is None:
            if len(self._totals) >= _MOST_KINDS:
                what = _OTHERS
            total = self._totals.setdefault(what, Total())
        total.count += 1
        total.seconds += seconds
        total.bytes += nbytes

    def longest(self, most: int) -> list[tuple[str, Total]]:
        """The purposes that have taken the most time, at most this many."""
        # Copy the totals: another thread may add a purpose meanwhile.
        totals = list(self._totals.copy().items())
        totals.sort(key=lambda pair: pair[1].seconds, reverse=True)
        return totals[:most]


class Exchanges(Protocol):
    """An object that knows the cost of the exchanges with other tasks so far."""

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for others."""

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that this rank has exchanged."""

    @property
    def totals(self) -> ExchangeTotals:
        """The exchanges between ranks, by purpose."""


class StepRate:
    """Counts steps: a step has begun when an optimizer is used again.

    So the two optimizers of a GAN make one step together. Models that are trained one
    after another continue the count, which may miss the first step of each. ``clock``
    returns seconds. Rates are averages over about a second. The ``tracer``, if there is
    one, also records each step.
    """

    def __init__(
        self,
        reporter: Reporter,
        exchanges: Exchanges,
        clock: Callable[[], float] = time.monotonic,
        *,
        tracer: Tracer | None = None,
    ) -> None:
        self._reporter = reporter
        self._tracer = tracer
        self._exchanges = exchanges
        reporter.totals = self._totals
        self._clock = clock
        self._steps = 0
        self._used: set[str] = set()
        """All optimizers so far."""
        self._used_in_step: set[str] = set()
        self._window = _Window(clock(), 0, 0.0)
        self._is_first = True
        """Whether this is the first window, whose rate is reported while it fills."""
        self._rates = (math.nan, math.nan)

    @property
    def steps(self) -> int:
        """The number of training steps that this rank has done."""
        return self._steps

    def applied(self, optimizer: str) -> None:
        """Count a step: ``optimizer`` was given a gradient from all ranks."""
        begins = not self._used_in_step or optimizer in self._used_in_step
        if begins:
            self._steps += 1
            self._used_in_step.clear()
        self._used_in_step.add(optimizer)
        is_new = optimizer not in self._used
        self._used.add(optimizer)
        if not begins and not is_new:
            return
        now = _Window(self._clock(), self._steps, self._exchanges.waited_s)
        if is_new:
            # Restart the window: the first step includes tracing and compilation.
            self._window = now
        elif (full := now.time_s - self._window.time_s >= _WINDOW_S) or self._is_first:
            self._rates = now.rates_since(self._window)
            if full:
                self._window, self._is_first = now, False
        if not begins:
            return
        self._reporter.step(self._steps, *self._rates, self._exchanges.exchanged_bytes)
        if self._tracer is not None:
            self._tracer.step(self._steps)

    def _totals(self) -> list[ExchangeTotal]:
        """The exchanges that have taken the most time."""
        return [
            ExchangeTotal(what, total.count, round(total.seconds, 3), total.bytes)
            for what, total in self._exchanges.totals.longest(_MOST_TOTALS)
        ]


@dataclass(frozen=True, slots=True)
class _Window:
    """The start of a time window: time, steps and waiting time at that moment."""

    time_s: float
    steps: int
    waited_s: float

    def rates_since(self, start: _Window) -> tuple[float, float]:
        """Steps per second, and the fraction of the time spent waiting."""
        elapsed_s = max(self.time_s - start.time_s, 1e-9)
        waited = (self.waited_s - start.waited_s) / elapsed_s
        return (self.steps - start.steps) / elapsed_s, min(1.0, waited)
