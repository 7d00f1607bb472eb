"""Trains on digits, and continues from its checkpoint as docs/how-to/resume.md says.

Epoch n ends at the earliest n times ``--pace`` seconds after ``--began`` (by the wall
clock), so that a soak of an hour has as many epochs as its undisturbed counterpart,
which needs no pace. Epochs after an interruption therefore catch up. Rank 0 appends a
line for each epoch that it completes, and writes the weights at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from sklearn.datasets import load_digits

ROWS = 512
BATCH = 64


class Pace(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Lets no epoch end too early, and notes the completed ones."""

    def __init__(self, began_s: float, pace_s: float, epochs: Path | None) -> None:
        super().__init__()
        self._began_s, self._pace_s, self._epochs = began_s, pace_s, epochs

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        due_s = self._began_s + (epoch + 1) * self._pace_s
        time.sleep(max(0.0, due_s - time.time()))
        if self._epochs is not None:
            with self._epochs.open("a") as file:
                line = {"epoch": epoch, "loss": float(logs["loss"])}
                file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--began", type=float, required=True)
    parser.add_argument("--pace", type=float, required=True)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    first = os.environ["TFCLUSTER_RANK"] == "0"
    epochs = given.output / "epochs.jsonl"

    keras.utils.set_random_seed(1797)
    images, labels = load_digits(return_X_y=True)
    images = images[:ROWS].reshape(-1, 8, 8, 1).astype("float32") / 16
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy")
    model.fit(
        images,
        labels[:ROWS],
        batch_size=BATCH,
        epochs=given.epochs,
        shuffle=False,
        callbacks=[
            Pace(given.began, given.pace, epochs if first else None),
            keras.callbacks.BackupAndRestore(given.output / "backup"),
        ],
        verbose=2,
    )
    if first:
        weights = {f"w{n}": each for n, each in enumerate(model.get_weights())}
        np.savez(given.output / "weights.npz", **weights)


if __name__ == "__main__":
    main()
