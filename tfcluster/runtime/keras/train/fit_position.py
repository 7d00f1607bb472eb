"""Tells the agent where in ``fit`` the program is: epoch, step, losses, metrics."""

from __future__ import annotations

from collections.abc import Mapping

import keras

from tfcluster.runtime.keras.types import Logs
from tfcluster.runtime.telemetry.agent_channel import Reporter, numbers


class FitPosition(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """The last of the callbacks of ``fit``; it changes nothing.

    After each step it only keeps a reference to the logs, which Keras creates anyway.
    The reporter asks for the other data about once a second.
    """

    def __init__(self, reporter: Reporter) -> None:
        super().__init__()
        self._reporter = reporter
        self._epoch = 0
        self._step = 0
        self._steps: int | None = None
        """The number of steps in the last epoch."""
        self._logs: Mapping[str, object] = {}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._reporter.position = self._tfcluster_position

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._epoch, self._step, self._logs = epoch + 1, 0, {}

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        # In threads, the call for an earlier step may come later.
        if batch >= self._step:
            self._step, self._logs = batch + 1, logs or {}

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._steps = self._step or None
        self._reporter.epoch(epoch + 1, logs or {})

    def _tfcluster_position(self) -> dict[str, object]:
        """The keys of a ``step`` event; what is unknown is left out."""
        params = self.params or {}
        found: dict[str, object] = {
            "epoch": self._epoch,
            "epochs": params.get("epochs"),
            "epoch_step": self._step,
            "epoch_steps": params.get("steps") or self._steps,
            "metrics": numbers(self._logs),
        }
        return {key: value for key, value in found.items() if value not in (None, {})}
