"""Traces a step of each model in ``argv``, and divides it among two ranks.

Prints what both took, and what the ranks would exchange.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import tensorflow as tf

from benchmarks.trainers.keras_models import with_batch
from tfcluster.runtime import tf_patches
from tfcluster.runtime.partition.explain import explained
from tfcluster.runtime.partition.watch import ExplainHook

RANKS = 2


def measured(name: str) -> dict[str, Any]:
    model, (x, y) = with_batch(name)
    # Builds the optimizer, and what TensorFlow makes once.
    model.train_on_batch(x, y)
    batch = tf.data.Dataset.from_tensor_slices((x, y)).batch(len(x))

    @tf.function  # type: ignore[untyped-decorator]
    def step(iterator: Any) -> Any:
        return model.train_step(next(iterator))

    began = time.perf_counter()
    iterator = iter(batch)
    traced = step.get_concrete_function(iterator)
    tracing = time.perf_counter() - began
    before = len(watch.programs)
    traced(iterator)
    (program,) = (each for each in watch.programs[before:] if each.trains)
    seen = explained(program)
    assert program.placed is not None
    return {
        "tracing": tracing,
        "ops": len(list(program.placed.graph.all_nodes())),
        "exchanges": seen.exchanges,
        "bytes": seen.exchanged_bytes,
        "share": seen.share,
        **program.seconds,
    }


watch = ExplainHook(RANKS)
tf_patches.TABLE.install(
    {tf_patches.CALL_FUNCTION: watch.call, tf_patches.FLAT_CALL: watch.flat_call}
)
names = sys.argv[1:]
# Once more, since the first program imports modules and fills tables.
measured(names[0])
found = {name: measured(name) for name in names}
print("TIMES", json.dumps(found), flush=True)
