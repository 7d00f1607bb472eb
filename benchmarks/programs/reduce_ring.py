"""Times all-reduces of MultiWorkerMirroredStrategy, which uses TensorFlow's own ring.

Started by ``tfcluster launch`` with ``strategy: none``.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.programs.reduce_times import report

options = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.RING
)
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
task = json.loads(os.environ["TF_CONFIG"])["task"]


def act(count: int) -> Callable[[], None]:
    tensor = tf.ones([count])

    def replica() -> Any:
        context = tf.distribute.get_replica_context()
        return context.all_reduce(tf.distribute.ReduceOp.SUM, tensor)

    total = tf.function(lambda: strategy.run(replica))

    def run() -> None:
        strategy.experimental_local_results(total())[0].numpy()[:1]

    run()
    return run


one = act(1)
report(task["index"], act, one)
one()
time.sleep(1.0)  # exiting at once would break transfers that peers still receive
# The strategy's threads may hang at interpreter exit if peers have already left.
os._exit(0)
