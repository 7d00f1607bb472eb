# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Random numbers of a program that sets no seed, and of one that does."""

import json
import multiprocessing
import os
import random
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf


def draw():
    return [
        random.random(),
        float(np.random.rand()),
        float(tf.random.uniform([])),
        float(keras.random.uniform([])),
        float(keras.layers.Dense(1).kernel_initializer((3, 1))[0][0]),
        int(next(iter(tf.data.Dataset.range(100_000).shuffle(100_000)))),
    ]


def draw_from_new():
    """From generators that are made without a seed, in helpers as well."""
    random.seed()
    np.random.seed()
    generators = random.Random(), np.random.default_rng(), np.random.RandomState()
    new = tf.random.Generator.from_non_deterministic_state()
    uniform = [new.uniform([]), tf.random.get_global_generator().uniform([])]
    return [
        random.random(),
        float(np.random.rand()),
        *(float(generator.random()) for generator in generators),
        *map(float, uniform),
    ]


def draw_with_own_seeds():
    """The numbers of ops that have seeds, and those that they draw in a new graph."""

    def drawn():
        return tf.random.uniform([], seed=7), tf.random.shuffle(tf.range(99), seed=8)

    number, order = (value.numpy().tolist() for value in drawn())
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        alone = [value.tolist() for value in session.run(drawn())]
    return [number, order], alone


def draw_in_helper(queue):
    numbers = random.random(), random.Random().random(), np.random.default_rng()
    queue.put((*numbers[:2], float(numbers[2].random())))


def draw_in_helpers():
    queue = FORK.Queue()
    helpers = [FORK.Process(target=draw_in_helper, args=(queue,)) for _ in range(2)]
    for helper in helpers:
        helper.start()
    drawn = sorted(queue.get() for _ in helpers)
    for helper in helpers:
        helper.join()
    return drawn


FORK = multiprocessing.get_context("fork")
helpers = draw_in_helpers()
own_seeds = draw_with_own_seeds()
unseeded = draw()
if os.environ["TFCLUSTER_RANK"] == "0":
    # A library makes a generator on this rank only.
    library = {"__name__": "library", "random": random}
    exec("random.Random()", library)
new = draw_from_new() + draw_from_new()
keras.utils.set_random_seed(4)
found = {"unseeded": unseeded, "new": new, "helpers": helpers, "seeded": draw()}
found["own_seeds"] = own_seeds
found["own"] = tempfile.mktemp(), random.SystemRandom().random()
print(json.dumps(found), file=sys.stdout)
