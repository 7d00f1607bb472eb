"""Finds the datasets over whose batches a program loops itself."""

from __future__ import annotations

import tensorflow as tf

from tfcluster.runtime import tf_internals
from tfcluster.runtime.keras.training_session import Session
from tfcluster.runtime.tensor_types import Dataset

IS_SHARDED = "_tfcluster_sharded"
"""Set on a Keras iterator whose batches go to this rank alone."""

YIELDS_BATCHES = "_tfcluster_yields_batches"
"""Set on our own datasets, whose class names do not show whether they yield batches."""


def serves_a_loop(session: Session, dataset: Dataset) -> bool:
    """Whether an iterator that is created now yields batches to a loop of the program.

    Iterators that Keras's methods create, iterators in graphs, and datasets of single
    rows do not.
    """
    return (
        not session.inside_keras and tf.executing_eagerly() and yields_batches(dataset)
    )


def yields_batches(dataset: Dataset) -> bool:
    """Whether the elements of a dataset are certainly batches."""
    if getattr(dataset, YIELDS_BATCHES, False):
        return True
    kind = tf_internals.kind_of(dataset)
    if kind in tf_internals.BATCHES:
        return True
    inputs = tf_internals.inputs_of(dataset)
    return (
        kind in tf_internals.KEEPS_BATCHES
        and bool(inputs)
        and all(yields_batches(source) for source in inputs)
    )


def on_demand(dataset: Dataset) -> Dataset:
    """The same dataset, producing each element only on request.

    The runtime decides at that moment which rows or which batches a rank gets.
    """
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    options.experimental_optimization.map_parallelization = False
    return dataset.with_options(options)
