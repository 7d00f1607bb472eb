"""Times the gradient of an MLP of 10.0 M parameters, whole and in parts. No tfcluster.

``argv``: the number of rows, and of parts. The gradient of each part is computed
separately, and the parts' gradients are added up: the work that ``runtime.shards``
gives a rank, without any exchange. Matrix products are written out, in the fastest way
that TensorFlow offers. Prints seconds for each step: for the whole, and in parts.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from typing import Any

import tensorflow as tf

SIZES = (784, 2048, 2048, 2048, 10)
ROUNDS, STEPS = 8, 5

rows, parts = map(int, sys.argv[1:])
weights = [
    tf.Variable(tf.random.normal(pair) * 0.03) for pair in itertools.pairwise(SIZES)
]
x = tf.random.normal((rows, SIZES[0]))


def gradient(x: Any) -> list[Any]:
    """The gradients of half the sum of squared outputs, by rows."""
    inputs = [x]
    for weight in weights[:-1]:
        inputs.append(tf.nn.relu(inputs[-1] @ weight))
    g = inputs[-1] @ weights[-1] / rows
    found = []
    for weight, given in zip(reversed(weights), reversed(inputs), strict=True):
        found.append(tf.matmul(given, g, transpose_a=True))
        # Written as ``g @ w.T``, it would copy the weights column by column.
        g = tf.transpose(tf.matmul(weight, g, transpose_b=True))
        g *= tf.cast(given > 0, tf.float32)
    return found


def added_up(several: list[list[Any]]) -> list[Any]:
    if len(several) == 1:
        return several[0]
    half = len(several) // 2
    lower, upper = added_up(several[:half]), added_up(several[half:])
    return [a + b for a, b in zip(lower, upper, strict=True)]


def update(gradients: list[Any]) -> None:
    for weight, each in zip(reversed(weights), gradients, strict=True):
        weight.assign_sub(0.01 * each)


def whole() -> None:
    update(gradient(x))


def in_parts() -> None:
    update(added_up([gradient(part) for part in tf.split(x, parts)]))


steps = {
    "whole": tf.function(whole, autograph=False),
    "parts": tf.function(in_parts, autograph=False),
}
found: dict[str, list[float]] = {name: [] for name in steps}
for _ in range(ROUNDS):
    for name, step in steps.items():
        begin = time.perf_counter()
        for _ in range(STEPS):
            step()
        found[name].append((time.perf_counter() - begin) / STEPS)
times = {name: statistics.median(several[2:]) for name, several in found.items()}
print("TIMES", json.dumps(times), flush=True)
