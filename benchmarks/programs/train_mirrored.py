"""Trains the MLP of ``train_keras.py`` under MultiWorkerMirroredStrategy.

Uses a custom loop, because Keras 3's ``fit`` fails under this strategy. ``argv[1]`` is
the global batch size. Started by ``tfcluster launch`` with ``strategy: none``.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from typing import Any

import tensorflow as tf

STEPS, EPOCHS = 30, 4

options = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.RING
)
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
batch = int(sys.argv[1]) // strategy.num_replicas_in_sync
tf.random.set_seed(0)
x = tf.random.normal([batch * STEPS, 784])
y = tf.random.uniform([batch * STEPS], 0, 10, tf.int32)
sizes = [784, 2048, 2048, 2048, 10]
with strategy.scope():
    weights = [
        (tf.Variable(tf.random.normal([a, b], stddev=0.05)), tf.Variable(tf.zeros([b])))
        for a, b in itertools.pairwise(sizes)
    ]
variables = [variable for pair in weights for variable in pair]


def replica(rows: Any, labels: Any) -> None:
    with tf.GradientTape() as tape:
        found = rows
        for kernel, bias in weights[:-1]:
            found = tf.nn.relu(found @ kernel + bias)
        found = found @ weights[-1][0] + weights[-1][1]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, found)
        loss = tf.reduce_mean(losses)
    gradients = tape.gradient(loss, variables)
    context = tf.distribute.get_replica_context()
    means = context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)

    def update(strategy: Any, means: Any) -> None:
        for variable, mean in zip(variables, means, strict=True):
            strategy.extended.update(
                variable, lambda v, g: v.assign_sub(0.01 * g), args=(mean,)
            )

    context.merge_call(update, args=(means,))


@tf.function  # type: ignore[untyped-decorator]
def step(rows: Any, labels: Any) -> None:
    strategy.run(replica, args=(rows, labels))


times = []
for _ in range(EPOCHS):
    begin = time.perf_counter()
    for number in range(STEPS):
        part = slice(number * batch, (number + 1) * batch)
        step(x[part], y[part])
    variables[0].read_value().numpy()
    times.append((time.perf_counter() - begin) / STEPS)
if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
    print("TIMES", json.dumps({"step": statistics.median(times[1:])}), flush=True)
# The strategy's threads may hang at interpreter exit if peers have already left.
os._exit(0)
