# Written like user scripts: without type annotations.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-subclassing-any
"""Pipelines that are computed by data tasks or by every rank: RESULTS [CASE...].

Each element contains the number that its producer has read from the file WHO.
"""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.runtime.programs.cases.tools import main, results
from tfcluster.runtime.data_service.pipeline import Pipeline

ROWS, BATCH, EPOCHS = 50, 8, 3


def who():
    return tf.strings.to_number(tf.io.read_file("WHO"), tf.int64)


def pipeline(rows=ROWS):
    return (
        tf.data.Dataset.range(rows)
        .shuffle(rows, seed=3)
        .map(lambda x: (x, who()))
        .batch(BATCH)
        .prefetch(2)
    )


class Recorder(keras.Model):
    """Records the rows that it receives."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.seen: list[list[int]] = [[]]
        self.makers: set[int] = set()

    def call(self, x):
        return self.dense(tf.cast(x, tf.float32)[:, None] / ROWS)

    def train_step(self, data):
        ids, makers = data
        tf.numpy_function(self.keep, [ids, makers], [])
        return super().train_step((ids, tf.cast(ids, tf.float32)[:, None] / 9))

    def keep(self, ids, makers):
        self.seen[-1].extend(ids.tolist())
        self.makers.update(makers.tolist())
        return []


class EpochByEpoch(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.seen.append([])


def case_fit():
    model = Recorder()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    held_out = pipeline(20).map(lambda x, maker: (x, tf.cast(x, tf.float32)))
    history = model.fit(
        pipeline(),
        validation_data=held_out,
        epochs=EPOCHS,
        callbacks=[EpochByEpoch()],
        verbose=0,
    )
    # A rank without rows of a small last batch gets one that does not count.
    found = {f"seen_{i}": np.array(ids) for i, ids in enumerate(model.seen[:EPOCHS])}
    return {**results(model, history), **found, "makers": np.array([*model.makers])}


def case_loop():
    dataset = pipeline()
    variable = keras.Variable(1.0)
    optimizer = keras.optimizers.SGD(0.001)
    found = {}
    for epoch in range(2):
        batches = []
        for ids, _ in dataset:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(variable * tf.cast(ids, tf.float32))
            optimizer.apply(tape.gradient(loss, [variable.value]), [variable])
            batches.append(ids.numpy())
        found[f"first_{epoch}"] = batches[0]
        found[f"rest_{epoch}"] = np.concatenate(batches[1:])
    return {**found, "variable": np.array(variable)}


def case_kept_here():
    """Only the ranks can call this function; the warning about it appears once."""

    def numbers():
        yield from range(ROWS)

    model = Recorder()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    spec = tf.TensorSpec([], tf.int64)
    dataset = tf.data.Dataset.from_generator(numbers, output_signature=spec)
    dataset = dataset.map(lambda x: (x, who())).batch(BATCH)
    for _ in range(2):
        model.fit(dataset, verbose=0)
    return {"makers": np.array([*model.makers])}


def case_structures():
    """Elements of various structures; and a few elements of an infinite dataset."""
    ragged = tf.ragged.constant([[1], [2, 3], [], [4]])
    dataset = tf.data.Dataset.from_tensor_slices(
        {"words": ["a", "bc", "", "d"], "ragged": ragged, "deep": ([1, 2, 3, 4],)}
    ).batch(2)
    found = list(dataset)
    endless = [int(x[0]) for x in dataset_of_ones().repeat().take(5)]
    return {
        "words": np.concatenate([each["words"] for each in found]).astype(str),
        "ragged": np.array(found[0]["ragged"].to_list()[1]),
        "deep": np.concatenate([each["deep"][0] for each in found]),
        "endless": np.array(endless),
    }


def dataset_of_ones():
    return tf.data.Dataset.from_tensors(1).batch(1)


def case_passes():
    """The order of each pass, from the pipeline's graph and in this process."""
    tf.random.set_seed(11)
    numbers = tf.data.Dataset.range(9)
    found: dict[str, Any] = {}
    for name, dataset in {
        "seeded": numbers.shuffle(9, seed=3),
        "common": numbers.shuffle(9),
        "twice": numbers.shuffle(9).map(lambda x: x + 1).shuffle(4),
        "fixed": numbers.shuffle(9, seed=3, reshuffle_each_iteration=False),
        "plain": numbers,
        "repeated": numbers.shuffle(9).repeat(2),
    }.items():
        graph = Pipeline(dataset)
        here = [list(dataset.as_numpy_iterator()) for _ in range(3)]
        there = [
            list(graph.for_pass(i, f"{name}{i}").as_numpy_iterator()) for i in range(3)
        ]
        found |= {f"{name}_here": np.array(here), f"{name}_there": np.array(there)}
    draws = Pipeline(numbers.map(lambda x: tf.random.uniform([])))
    found["draws"] = np.array(
        [next(draws.for_pass(i, f"d{i}").as_numpy_iterator()) for i in range(3)]
    )
    return found


def case_reasons():
    """Why one or two data tasks cannot compute a pipeline."""
    numbers = tf.data.Dataset.range(9)
    variable = tf.Variable(1, dtype=tf.int64)
    asked = {
        "plain": numbers.shuffle(3).map(lambda x: x).batch(2).repeat(2),
        "python": numbers.map(lambda x: tf.py_function(lambda y: y, [x], tf.int64)),
        "variable": numbers.map(lambda x: x + variable),
        "take": numbers.take(3),
        "remainder": numbers.batch(2, drop_remainder=True),
        "files": tf.data.TFRecordDataset(["one", "other"]).batch(2),
        "zip": tf.data.Dataset.zip(numbers, numbers),
    }
    return {
        f"{name}_{tasks}": np.array(str(Pipeline(dataset).why_local(tasks)))
        for name, dataset in asked.items()
        for tasks in (1, 2)
    }


if __name__ == "__main__":
    pathlib.Path("WHO").write_text("0")
    main(globals())
