"""Trains, and prints on which addresses of TCP this process listens meanwhile."""

import json
from contextlib import suppress
from pathlib import Path

import keras
import numpy as np

_LISTENING = "0A"  # TCP_LISTEN in /proc/net/tcp


def listening() -> list[str]:
    """The addresses, as ``0100007F:9C40``."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            own.add(str(descriptor.readlink()))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    return [
        row[1] for row in rows if row[3] == _LISTENING and f"socket:[{row[9]}]" in own
    ]


class Looking(keras.callbacks.Callback):  # type: ignore[misc]  # untyped
    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if batch == 2:
            print("LISTENING", json.dumps({"addresses": listening()}), flush=True)


model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile(optimizer="sgd", loss="mse")
rows = np.ones((32, 2), np.float32)
model.fit(rows, rows[:, :1], batch_size=8, verbose=0, callbacks=[Looking()])
