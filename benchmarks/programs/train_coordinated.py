"""Trains the MLP of ``train_parameter_server.py`` in a custom loop.

Under ParameterServerStrategy; a ClusterCoordinator on the chief schedules steps on the
workers. Started by ``tfcluster launch`` with ``strategy: none``; ``argv`` is the same
as for ``train_parameter_server.py``.
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

EPOCHS = 5

width, batch, steps = map(int, sys.argv[1:])
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
sizes = [784, width, width, width, 10]
with strategy.scope():
    weights = [
        (tf.Variable(tf.random.normal([a, b], stddev=0.02)), tf.Variable(tf.zeros([b])))
        for a, b in itertools.pairwise(sizes)
    ]
variables = [variable for pair in weights for variable in pair]


def replica() -> Any:
    rows = tf.random.normal([batch, 784])
    labels = tf.random.uniform([batch], 0, 10, tf.int32)
    with tf.GradientTape() as tape:
        found = rows
        for kernel, bias in weights[:-1]:
            found = tf.nn.relu(found @ kernel + bias)
        found = found @ weights[-1][0] + weights[-1][1]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, found)
        loss = tf.reduce_mean(losses)
    for gradient, variable in zip(
        tape.gradient(loss, variables), variables, strict=True
    ):
        variable.assign_sub(0.01 * gradient)
    return loss


@tf.function  # type: ignore[untyped-decorator]
def step() -> Any:
    return strategy.run(replica)


times = []
for _ in range(EPOCHS):
    begin = time.perf_counter()
    for _ in range(steps):
        coordinator.schedule(step)
    coordinator.join()
    times.append((time.perf_counter() - begin) / steps)
print("TIMES", json.dumps({"step": statistics.median(times[2:])}), flush=True)
# The coordinator's threads may hang at interpreter exit while servers are running.
os._exit(0)
