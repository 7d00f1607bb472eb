# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""A program that combines its own gradients: RESULTS CASE...

Each rank writes RESULTS-RANK.json. The runtime never divides the batches of such a
program, so it is in a separate file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

RANK = int(os.environ.get("TFCLUSTER_RANK", "0"))


def case_pieces():
    """A hand-written loop, first synchronous, then with weights averaged at times.

    It uses only calls: neither a TensorFlow strategy nor a hook.
    """
    import numpy as np
    import tensorflow as tf

    import tfcluster.runtime as tfc

    tfc.init()
    weights = tf.Variable(np.full(3, float(tfc.rank() + 1)))
    tfc.broadcast_variables([weights], root_rank=0)
    begun = weights.numpy().tolist()
    rows = tf.data.Dataset.range(12).shard(tfc.size(), tfc.rank())

    def gradient(row):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((weights - tf.cast(row, tf.float64)) ** 2) / 2
        return tape.gradient(loss, weights)

    for row in rows:
        weights.assign_sub(0.1 * tfc.allreduce(gradient(row)))
    in_step = weights.numpy().tolist()
    apart = []
    for step, row in enumerate(rows, start=1):
        weights.assign_sub(0.1 * gradient(row))
        apart.append(weights.numpy().tolist())
        if step % 3 == 0:
            weights.assign(tfc.allreduce(weights))
    everybody = tfc.allgather_object([tfc.rank(), weights.numpy().tolist()])
    return {
        "begun": begun,
        "in_step": in_step,
        "apart": apart,
        "everybody": everybody,
        "strategy": tf.distribute.has_strategy(),
    }


if __name__ == "__main__":
    path, *cases = sys.argv[1:]
    found = {name: globals()[f"case_{name}"]() for name in cases}
    Path(f"{path}-{RANK}.json").write_text(json.dumps(found))
