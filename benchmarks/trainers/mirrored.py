"""Trains under MultiWorkerMirroredStrategy with a loop of its own.

Keras 3's ``fit`` fails under this strategy.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.trainers import workload
from benchmarks.trainers.keras_models import build

job = workload.parse()
rank, size = workload.place()
options = tf.distribute.experimental.CommunicationOptions(
    implementation=tf.distribute.experimental.CommunicationImplementation.RING
)
strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
x, y = map(tf.constant, job.rows_of_rank(rank, size))
with strategy.scope():
    model = build(job.model, job.optimizer)
    model.optimizer.build(model.trainable_variables)


def replica(rows: Any, labels: Any) -> Any:
    with tf.GradientTape() as tape:
        loss = model.loss(labels, model(rows, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    context = tf.distribute.get_replica_context()
    means = context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
    model.optimizer.apply(means, model.trainable_variables)
    return loss


@tf.function  # type: ignore[untyped-decorator]
def step(rows: Any, labels: Any) -> Any:
    return strategy.run(replica, args=(rows, labels))


def run(steps: int) -> float:
    for _ in range(steps):
        loss = step(x, y)
    return float(loss)


parameters = sum(int(np.prod(weight.shape)) for weight in model.trainable_variables)
workload.train(job, run, parameters)
# Ends the ranks together: the first one that leaves makes the others fail.
run(1)
# The strategy's threads may hang at interpreter exit if peers have already left.
os._exit(0)
