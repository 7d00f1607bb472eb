# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Trainings whose ranks are on several hosts.

RESULTS [CASE...], as in ``cases/tools.py``. With HOSTS=several every rank counts as a
host of its own, with HOSTS=pairs two do, although all run on this machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.runtime.programs.cases.inputs import (  # noqa: F401 - cases of ``main``
    case_divided_loops,
    case_errors_in_loops,
    case_loops_that_differ,
)
from tests.runtime.programs.cases.tools import RANK, compiled, data, main, results
from tfcluster.runtime import process_group

HOSTS = os.environ.get("HOSTS")
if HOSTS:
    hooked: Any = process_group.group()._transport
    hooked._host_key = f"host {RANK // 2}" if HOSTS == "pairs" else ""


def wide(*extra, first=True):
    """A model of 1.4 M weights in three layers."""
    layers = [
        keras.layers.Dense(1100, activation="tanh", trainable=first),
        keras.layers.Dense(1200, activation="tanh"),
        *extra,
        keras.layers.Dense(2, activation="softmax"),
    ]
    return keras.Sequential([keras.Input((6,)), *layers])


if os.environ.get("DIES") and RANK == 1:
    own_group: Any = process_group.group()
    exchange = own_group.exchange
    begun: list[str] = []

    @contextlib.contextmanager
    def dying(signature, *args, **kwargs):
        """Die within an exchange of the fourth step."""
        with exchange(signature, *args, **kwargs) as call:
            begun.append(signature.what)
            if begun.count(signature.what) == 4 and "exchange" in signature.what:
                os.kill(os.getpid(), signal.SIGKILL)
            yield call

    own_group.exchange = dying


def case_fit():
    """The last batch has one row, so one rank has none."""
    x, y = data(49)
    model = compiled(wide())
    history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return results(model, history)


def case_normalized():
    """With exchanges in the forward and the backward pass, and of averages."""
    x, y = data(49)
    model = compiled(wide(keras.layers.BatchNormalization()))
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return results(model, history)


def case_several_steps():
    """A loop in the graph, and graphs for two sizes of batches."""
    x, y = data(49)
    model = compiled(wide(), steps_per_execution=2)
    history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return results(model, history)


def case_tape():
    """A loop of its own; clipped by the global norm."""
    x, y = data(49)
    model = wide()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    loss_of = keras.losses.SparseCategoricalCrossentropy()
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(rows, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(rows, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients, _ = tf.clip_by_global_norm(gradients, 0.5)
        optimizer.apply(gradients, model.trainable_variables)

    for _ in range(3):
        for rows, labels in tf.data.Dataset.from_tensor_slices((x, y)).batch(16):
            step(rows, labels)
    return results(model)


def case_mismatch():
    """Rank 1 has frozen a layer, so it has other gradients."""
    x, y = data(49)
    model = compiled(wide(first=RANK == 0))
    text = ""
    try:
        model.fit(x, y, batch_size=16, epochs=1, verbose=0)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return {"raised": np.array(text)}


if __name__ == "__main__":
    main(globals())
