# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Helpers for many small trainings, written as users would for one machine.

    THEME.py RESULTS [CASE...]

Each ``case_*`` returns numbers, which are saved to RESULTS-<rank>.npz as ``case/name``;
the text of an exception is saved as ``case/error``. The same file runs as one process
and as N. FLOATX is the precision.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from typing import Any

import keras
import numpy as np
import tensorflow as tf

RANK = int(os.environ.get("TFCLUSTER_RANK", "0"))
RANKS = int(os.environ.get("TFCLUSTER_SIZE", "1"))
SHARDS = "shards" in os.environ.get("TFCLUSTER_RUNTIME", "")
"""Whether it runs with ``runtime.shards``, which sets the optimization of graphs."""

ROWS, EPOCHS = 242, 4
"""Batches of 16 give 64 steps, or 52 if a fifth of the rows is for validation; the last
batch of an epoch has two rows, or one."""

OPTIMIZED = {
    *("batches_of_one", "fit", "gan", "mean_by_weights", "tape_graph"),
    "tape_takes_batches",
}
"""Cases with graph optimization, as usual; the others trace faster without it."""


def data(rows=50, features=6):
    generator = np.random.default_rng(7)
    x = generator.normal(size=(rows, features)).astype("float32")
    y = (x @ generator.normal(size=features) > 0).astype("int32")
    return x, y


def classifier(*extra, dtype=None):
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", dtype=dtype),
            *extra,
            keras.layers.Dense(2, activation="softmax", dtype=keras.config.floatx()),
        ]
    )


def compiled(model, optimizer=None, **kwargs):
    model.compile(
        optimizer or keras.optimizers.SGD(0.1, momentum=0.9),
        kwargs.pop("loss", "sparse_categorical_crossentropy"),
        metrics=kwargs.pop("metrics", ["accuracy"]),
        **kwargs,
    )
    return model


def results(model, history=None):
    found = {f"w{i}": weight for i, weight in enumerate(model.get_weights())}
    for key, values in (history.history if history else {}).items():
        found[f"history_{key}"] = np.array(values, "float64")
    return found


def raised_by(act):
    """The exception that ``act`` raises, as text; "nothing" if it raises none."""
    try:
        act()
    except Exception as error:
        return {"raised": np.array(f"{type(error).__name__}: {error}")}
    return {"raised": np.array("nothing")}


def main(program):
    """Run the cases of a theme: all ``case_*`` in its globals, or the chosen ones."""
    path, *chosen = sys.argv[1:]
    gc.freeze()  # Collections after each case skip the libraries' objects.
    keras.config.set_floatx(os.environ.get("FLOATX", "float32"))
    found: dict[str, Any] = {}
    for name, case in list(program.items()):
        if not name.startswith("case_") or (chosen and name[5:] not in chosen):
            continue
        if not SHARDS:
            tf.config.optimizer.set_experimental_options(
                {"disable_meta_optimizer": name[5:] not in OPTIMIZED}
            )
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        began = time.process_time()
        try:
            outcome = case()
        except Exception:
            outcome = {"error": np.array(traceback.format_exc())}
            print(name, outcome["error"])
        found |= {f"{name[5:]}/{key}": value for key, value in outcome.items()}
        print(f"{name} done after {time.process_time() - began:.2f} s", flush=True)
    np.savez(f"{path}-{RANK}.npz", **found)
