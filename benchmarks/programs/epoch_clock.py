"""A callback that measures the time of a step; shared by several programs."""

from __future__ import annotations

import time
from typing import Any

import keras


class EpochClock(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """The seconds of a step in each epoch of ``steps`` steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.times: list[float] = []
        self.cpu_times: list[float] = []
        """Those of all threads of this process."""
        self._steps = steps
        self._began = self._cpu_began = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._began, self._cpu_began = time.perf_counter(), time.process_time()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.times.append((time.perf_counter() - self._began) / self._steps)
        cpu_s = time.process_time() - self._cpu_began
        self.cpu_times.append(cpu_s / self._steps)
