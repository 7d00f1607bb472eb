"""A callback that measures the time of a step; shared by several programs."""

from __future__ import annotations

import time
from typing import Any

import keras


class EpochClock(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """``times`` has the seconds of a step in each epoch of ``steps`` steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.times: list[float] = []
        self._steps = steps
        self._began = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.times.append((time.perf_counter() - self._began) / self._steps)
