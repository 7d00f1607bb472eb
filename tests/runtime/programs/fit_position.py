"""Prints the events of two calls of ``fit``: one of arrays, one of unknown length."""

import json
import socket
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime.keras.train.injected_callbacks import FitPosition
from tfcluster.runtime.telemetry.agent_channel import Reporter


class Stepping(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    """Reports a step after every batch, each of them a second later."""

    def __init__(self, reporter: Reporter, clock: list[float]) -> None:
        super().__init__()
        self._reporter, self._clock = reporter, clock

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self._clock[0] += 1
        self._reporter.step(batch, 1.0, 0.0)


def fitted(x: Any, y: Any, **options: Any) -> list[Any]:
    ours, theirs = socket.socketpair()
    clock = [100.0]
    reporter = Reporter(ours, lambda: clock[0])
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    callbacks = [FitPosition(reporter), Stepping(reporter, clock)]
    with reporter.keeping_position():
        model.fit(x, y, epochs=2, callbacks=callbacks, verbose=0, **options)
    reporter.step(99, 1.0, 0.0)
    reporter.flush()
    with ours, theirs:
        ours.shutdown(socket.SHUT_WR)
        return [json.loads(line) for line in theirs.makefile()]


def batches() -> Any:
    for _ in range(3):
        yield np.zeros((2, 2), np.float32), np.zeros((2, 1), np.float32)


rows = np.zeros((6, 2), np.float32)
spec = (tf.TensorSpec((2, 2)), tf.TensorSpec((2, 1)))
endless = tf.data.Dataset.from_generator(batches, output_signature=spec)
found = {
    "arrays": fitted(rows, rows[:, :1], batch_size=2, validation_split=0.33),
    "unknown": fitted(endless, None),
}
print(f"EVENTS {json.dumps(found)}")
