"""tf.data iterators run without autotuning, unless the script asks for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit.ranks import ROOT

PROGRAM = """
import os
import tempfile
import time

import tensorflow as tf
from tfcluster.runtime.partition import reading_ahead

warnings = []
reading_ahead.install(warnings.append)
numbers = tf.data.Dataset.range(10).shuffle(10, seed=1)
doubled = numbers.map(lambda x: 2 * x, num_parallel_calls=tf.data.AUTOTUNE).batch(4)
asked = tf.data.Options()
asked.autotune.enabled = True

def of(dataset):
    return iter(dataset)._dataset.options().autotune.enabled

print(of(doubled), of(doubled.with_options(asked)), doubled.options().autotune.enabled)
ahead = [numbers.prefetch(n)._buffer_size for n in (tf.data.AUTOTUNE, 0, 3)]
print([int(n) for n in ahead], int(iter(doubled)._dataset._inputs()[0]._buffer_size))
passes = [sorted(int(x) for batch in doubled for x in batch) for _ in range(2)]
print(passes[0] == passes[1] == [*range(0, 20, 2)])

fused = tf.data.experimental.shuffle_and_repeat(50, 1, seed=3)
fused = tf.data.Dataset.range(50).apply(fused)
first, second = ([int(x) for x in fused] for _ in range(2))
print(first != second)

calls = []
def called(x):
    calls.append(x)
    return x

file = os.path.join(tempfile.mkdtemp(), "cache")
cached = numbers.map(lambda x: tf.numpy_function(called, [x], tf.int64)).cache(file)
for _ in range(2):
    batches = iter(cached.batch(5))
    # Nobody asks for the end of the data, but the cache is complete nevertheless.
    next(batches), next(batches)
    while not os.path.exists(f"{file}.index"):
        time.sleep(0.01)
    del batches
print(len(calls))

def shuffled(**options):
    return tf.data.Dataset.range(10).shuffle(10, **options)

mapped = shuffled().repeat(3).map(tf.square)
endless = shuffled().repeat().map(tf.square)
unused = shuffled().repeat().batch(4)
again = shuffled(reshuffle_each_iteration=False).repeat().map(tf.square)
for *passes, count in (
    (doubled, doubled, 0), (unused, unused, 0), (again, again, 0), (mapped, 0),
    (mapped, 0), (mapped, mapped.take(1), 1), (endless, 1), (endless, 2),
):
    iterators = [iter(dataset) for dataset in passes]
    assert len(warnings) == count, passes
    del iterators
"""


@pytest.mark.slow
@pytest.mark.tensorflow
def test_an_iterator_ends_without_waiting_for_a_tuner() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    texts = ["False True None", "[1, 0, 3] 1", "True", "True", "10"]
    assert done.stdout.splitlines() == texts
