"""A rank that trains for many steps, and prints the growth of its memory in KiB."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfcluster.runtime as tfc

STEPS, EARLY = 10_000, 3_000


def resident_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


class Watch(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch >= EARLY and "early" not in self.seen:
            self.seen["early"] = resident_kib()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen["late"] = resident_kib()


x = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(8).repeat()
model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(64)])
model.add(keras.layers.Dense(1))
model.compile("sgd", "mse", steps_per_execution=100)
watch = Watch()
model.fit(data, steps_per_epoch=STEPS, epochs=1, verbose=0, callbacks=[watch])
fit = watch.seen["late"] - watch.seen["early"]

for step in range(STEPS // 5):
    if step == EARLY // 5:
        early = resident_kib()
    tfc.allreduce(tf.fill([20_000 + step % 3], 1.0))
grown = resident_kib() - early

# Results must not change with later exchanges or assignments.
variable = tf.Variable(tf.fill([50_000], 1.0))
kept = [tfc.allreduce(variable), tfc.broadcast(variable, 0), tfc.allgather(variable)]
for _ in range(10):
    variable.assign_add(tf.ones_like(variable))
    kept.append(tfc.allreduce(variable, op=tfc.Max))
for value, tensor in zip([1, 1, 1, *range(2, 12)], kept, strict=True):
    assert bool(tf.reduce_all(tensor == float(value))), (value, tensor)

print(json.dumps({"fit": fit, "allreduce": grown}))
