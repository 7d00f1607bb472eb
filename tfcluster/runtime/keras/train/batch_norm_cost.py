"""Says once what the exchanges of ``BatchNormalization`` cost, if they cost much."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

_FIRST_STEP = 3
"""The first steps include tracing."""
_MIN_S, _MIN_STEPS = 1.0, 8
_MUCH = 0.1
"""Fraction of a step."""


class Steps(Protocol):
    """Counts the training steps that this rank has done."""

    @property
    def steps(self) -> int: ...


class BatchNormCost:
    """Measures the exchanges over some steps and calls ``say`` with a text, or never.

    Exchanges must not overlap. ``clock`` returns seconds.
    """

    def __init__(
        self,
        steps: Steps,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steps = steps
        self._say = say
        self._clock = clock
        self._begin: tuple[float, int] | None = None
        self._exchanges_s = 0.0
        self._layers: set[str] = set()
        self._done = False

    @contextmanager
    def exchanging(self, layer: str) -> Iterator[None]:
        """A context in which the ranks exchange the statistics of ``layer``."""
        if self._done:
            yield
            return
        start_s = self._clock()
        yield
        self._ended(layer, start_s)

    def _ended(self, layer: str, start_s: float) -> None:
        now_s, steps = self._clock(), self._steps.steps
        if self._begin is None:
            if steps >= _FIRST_STEP:
                self._begin = now_s, steps
            return
        self._layers.add(layer)
        self._exchanges_s += now_s - start_s
        begin_s, first = self._begin
        elapsed_s = now_s - begin_s
        if elapsed_s < _MIN_S or steps - first < _MIN_STEPS:
            return
        self._done = True
        share = self._exchanges_s / elapsed_s
        if share > _MUCH:
            self._say(
                f"the exchanges of {len(self._layers)} BatchNormalization layers take "
                f"{share:.0%} of the time, including waiting for other ranks. They "
                "make the result equal to that of one machine. With "
                "runtime.batch_normalization: local, each rank normalises over its own "
                "rows, without these exchanges"
            )
