# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Run an unmodified script, then save what it has trained.

    final_weights.py RESULTS SCRIPT [ARG...]

The weights after the last ``fit`` and its history go to RESULTS-<rank>.npz.
"""

from __future__ import annotations

import os
import runpy
import sys

import keras
import numpy as np

RANK = os.environ.get("TFCLUSTER_RANK", "0")


def main(results, script, *args):
    found = {}
    fit = keras.Model.fit

    def remembered(model, *positional, **named):
        history = fit(model, *positional, **named)
        found.update({f"w{i}": w for i, w in enumerate(model.get_weights())})
        found.update({f"history_{k}": v for k, v in history.history.items()})
        return history

    keras.Model.fit = remembered
    sys.argv[:] = [script, *args]
    runpy.run_path(script, run_name="__main__")
    np.savez(f"{results}-{RANK}.npz", **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
