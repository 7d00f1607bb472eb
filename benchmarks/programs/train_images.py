"""Trains a small model on JPEG images that a pipeline decodes.

Prints how long an epoch takes, and the CPU time of the first rank in it, in seconds.

``argv`` may contain ``strings``: then the pipeline parses lines of numbers. With
``late``, it shuffles after that, and a function of batches follows. With
``loop``, a loop of the program trains instead of ``fit``. With ``whole``, the function
of the pipeline reads a variable, so that ranks cannot divide it. Each rank runs on one
core.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

RANK = int(os.environ.get("TFCLUSTER_RANK", "0"))
os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[RANK]})

import keras  # noqa: E402 - TensorFlow counts its cores when it is imported
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from benchmarks.programs.epoch_clock import EpochClock  # noqa: E402

BATCH, STEPS, EPOCHS = 64, 48, 3
SIDE, PIXELS, NUMBERS = 512, 64, 400


def decoded(image: Any) -> Any:
    pixels = tf.ensure_shape(tf.io.decode_jpeg(image, channels=3), [SIDE, SIDE, 3])
    return tf.image.resize(pixels, [PIXELS, PIXELS]) / 255.0


def parsed(line: Any) -> Any:
    numbers = tf.strings.to_number(tf.strings.split(line, ","))
    return tf.ensure_shape(numbers, [NUMBERS])


keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
function: Callable[[Any], Any] = decoded
shape: tuple[int, ...] = (PIXELS, PIXELS, 3)
if "strings" in sys.argv:
    function, shape = parsed, (NUMBERS,)
    texts = [",".join(map(str, rng.integers(0, 99, NUMBERS))) for _ in range(BATCH)]
    elements = tf.constant(texts)
else:
    small = tf.constant(rng.integers(0, 255, (BATCH, 24, 24, 3)))
    large = tf.cast(tf.image.resize(small, [SIDE, SIDE]), tf.uint8)
    elements = tf.stack([tf.io.encode_jpeg(image) for image in large])


zero = tf.Variable(0.0)


def example(element: Any, label: Any) -> tuple[Any, Any]:
    return function(element) + (zero if "whole" in sys.argv else 0.0), label


dataset = tf.data.Dataset.from_tensor_slices((elements, rng.integers(0, 10, BATCH)))
dataset = dataset.repeat(STEPS)
if "late" not in sys.argv:
    dataset = dataset.shuffle(4 * BATCH, seed=2)
dataset = dataset.map(example, num_parallel_calls=tf.data.AUTOTUNE)
if "late" in sys.argv:
    dataset = dataset.shuffle(4 * BATCH, seed=2)
layers = [keras.layers.Flatten(), keras.layers.Dense(10)]
model = keras.Sequential([keras.Input(shape), *layers])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.SGD(0.01), loss)
batches = dataset.batch(BATCH)
if "late" in sys.argv:
    batches = batches.map(lambda x, y: (x * 2.0 - 1.0, y))
batches = batches.prefetch(2)


@tf.function  # type: ignore[untyped-decorator]
def step(x: Any, y: Any) -> None:
    with tf.GradientTape() as tape:
        value = loss(y, model(x, training=True))
    weights = model.trainable_variables
    gradients = tape.gradient(value, weights)
    model.optimizer.apply_gradients(zip(gradients, weights, strict=True))


def train(epochs: int) -> float:
    """Train, and return the seconds that an epoch takes."""
    if "loop" not in sys.argv:
        clock = EpochClock(STEPS)
        model.fit(batches, epochs=epochs, verbose=0, callbacks=[clock])
        return STEPS * statistics.median(clock.times)
    times_s = []
    for _ in range(epochs):
        start_s = time.perf_counter()
        for x, y in batches:
            step(x, y)
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s)


train(1)
cpu_s = time.process_time()
epoch_s = train(EPOCHS)
cpu_s = time.process_time() - cpu_s
if RANK == 0:
    found = {"epoch": epoch_s, "cpu": cpu_s / EPOCHS}
    print("TIMES", json.dumps(found), flush=True)
