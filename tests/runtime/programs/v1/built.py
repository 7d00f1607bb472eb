# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any

"""Trains on real digits with a replicated graph, and the same on one machine.

built.py STEPS
"""

import json
import sys

import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits

import tfcluster.runtime as tfc

tf.disable_eager_execution()
STEPS, BATCH, TOWERS = int(sys.argv[1]), 64, 2

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
order = np.random.RandomState(5).permutation(len(images))
batches = [order[n * BATCH : (n + 1) * BATCH] for n in range(STEPS)]


def optimizer():
    return tf.train.MomentumOptimizer(0.1, 0.9)


def model(x, y):
    start = tf.random_normal_initializer(stddev=0.1, seed=7)
    hidden = tf.nn.relu(x @ tf.get_variable("a/w", [64, 32], initializer=start))
    logits = hidden @ tf.get_variable("b/w", [32, 10], initializer=start)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
    )


def placeholders(count):
    return [
        (tf.placeholder(tf.float32, [None, 64]), tf.placeholder(tf.int64, [None]))
        for _ in range(count)
    ]


def feeds(inputs, parts):
    return {
        placeholder: values[rows]
        for pair, rows in zip(inputs, parts, strict=True)
        for placeholder, values in zip(pair, (images, labels), strict=True)
    }


def on_the_cluster():
    workers = tfc.v1.workers()
    inputs = placeholders(TOWERS)
    training = tfc.v1.replicated_graph(
        lambda tower: model(*inputs[tower]),
        optimizer(),
        towers=["cpu:0"] * TOWERS,
        mean=True,
    )
    shares = workers.num_worker * TOWERS
    own = slice(workers.rank * TOWERS, (workers.rank + 1) * TOWERS)
    with tf.train.MonitoredTrainingSession(hooks=[training.hook]) as session:
        first = session.run(list(training.masters))
        for rows in batches:
            parts = np.split(rows, shares)[own]
            session.run(training.train_op, feeds(inputs, parts))
        return first, session.run(list(training.masters))


def alone(first):
    inputs = placeholders(1)
    loss = model(*inputs[0])
    train = optimizer().minimize(loss)
    variables = tf.trainable_variables()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for variable, value in zip(variables, first, strict=True):
            variable.load(value, session)
        begin = session.run(loss, feeds(inputs, [order]))
        for rows in batches:
            session.run(train, feeds(inputs, [rows]))
        end = session.run(loss, feeds(inputs, [order]))
        return begin, end, session.run(variables)


with tf.Graph().as_default():
    first, last = on_the_cluster()
with tf.Graph().as_default():
    begin, end, expected = alone(first)
apart = [
    float(np.abs(a - b).max() / np.abs(b).max())
    for a, b in zip(last, expected, strict=True)
]
found = {"begin": float(begin), "end": float(end), "apart": max(apart)}
print("built", json.dumps(found), flush=True)
