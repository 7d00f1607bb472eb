"""Trains with Keras's ``fit``, and does not mention tfcluster.

One process trains the whole batch; under tfcluster, the ranks divide it.
"""

from __future__ import annotations

import keras
import numpy as np

from benchmarks.programs.epoch_clock import EpochClock
from benchmarks.trainers import workload
from benchmarks.trainers.keras_models import build
from benchmarks.trainers.workload import Array, Workload


def fit(load: Workload, x: Array, y: Array) -> None:
    """Train on copies of a batch, or of this process's part of it, and report."""
    model = build(load.model, load.optimizer)
    model.fit(x, y, batch_size=len(x), verbose=0)
    first_s = workload.since_start()
    clock = EpochClock(load.steps)
    history = model.fit(
        np.concatenate([x] * load.steps),
        np.concatenate([y] * load.steps),
        batch_size=len(x),
        epochs=load.blocks,
        shuffle=False,
        verbose=0,
        callbacks=[clock],
    )
    parameters = sum(int(np.prod(weight.shape)) for weight in model.trainable_variables)
    workload.report(first_s, clock.times, parameters, history.history["loss"][-1])


if __name__ == "__main__":
    keras.config.disable_traceback_filtering()
    job = workload.parse()
    fit(job, *job.rows_of_rank(0, 1))
