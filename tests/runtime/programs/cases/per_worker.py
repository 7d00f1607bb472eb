# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""A script that divides its data itself; a single process uses all ranks' batches.

PARTS is the number of ranks of the distributed run.
"""

from __future__ import annotations

import os

import keras
import numpy as np

import tfcluster.runtime as tfc
from tests.runtime.programs.cases.tools import main, results

PARTS = int(os.environ["PARTS"])
BATCHES, ROWS = 10, 5


def own_part(array):
    """This rank's rows; in one process, batch b joins batch b of all ranks."""
    if tfc.size() == PARTS:
        array = array[tfc.rank() :][:1]
    return array.swapaxes(0, 1).reshape(-1, array.shape[-1])


def trained(loss, weighted=False):
    generator = np.random.default_rng(1)
    shape = (PARTS, BATCHES, ROWS)
    x = own_part(generator.normal(size=(*shape, 6)))
    y = own_part(generator.normal(size=(*shape, 1)))
    weights = own_part(generator.uniform(size=(*shape, 1)))[:, 0]
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.003), loss, metrics=["mae"])
    return results(
        model,
        model.fit(
            x,
            y,
            batch_size=ROWS * (PARTS if tfc.size() == 1 else 1),
            epochs=5,
            sample_weight=weights if weighted else None,
            shuffle=False,
            verbose=0,
        ),
    )


def case_per_worker():
    return trained("mse")


def case_per_worker_sum():
    return trained(keras.losses.MeanSquaredError(reduction="sum"))


def case_per_worker_weights():
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return trained(loss, weighted=True)


if __name__ == "__main__":
    main(globals())
