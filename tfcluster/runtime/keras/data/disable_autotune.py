"""Disables ``tf.data`` autotuning: iterators end at once, and read equally far ahead.

In each iterator a thread looks for better settings, first after 10 ms and then after
twice as long each time, up to a minute. Deleting an iterator wakes this thread and
waits for its end. But "cancelled" is only set after the wake-up
(``CancellationManager::StartCancel``): if the thread checks it before that, the thread
continues to sleep. So the end of an epoch may take as long as the epoch did. On idle
cores this usually happens, and all ranks wait for the slowest.

A buffer of ``prefetch(AUTOTUNE)`` begins with one element, and grows when it happens to
be full and then empty. How far an iterator has read ahead decides what the next one
yields: passes over a shuffled dataset draw their seeds from one generator, when they
begin. So the buffer keeps its first size, or ranks would train on different batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_internals, tf_patches
from tfcluster.runtime.contract import HandlerPlace
from tfcluster.runtime.tensor_types import Dataset, Nest

_AHEAD = 1
"""The number of elements with which TensorFlow lets a buffer begin."""


def install() -> None:
    """Disable autotuning in every iterator unless the script asks for it.

    ``AUTOTUNE`` then means as many parallel calls as TensorFlow has threads, and a
    buffer of one element.
    """
    tf_patches.TABLE.install(
        {tf_patches.DATASET_ITER: _iter, tf_patches.DATASET_PREFETCH: _prefetch},
        HandlerPlace.LAST,
    )


def _prefetch(
    original: Callable[..., Dataset],
    dataset: Dataset,
    buffer_size: Any,
    name: str | None = None,
) -> Dataset:
    if isinstance(buffer_size, int) and buffer_size == tf.data.AUTOTUNE:
        buffer_size = _AHEAD
    return original(dataset, buffer_size, name=name)


def _iter(
    original: Callable[[Dataset], Iterator[Nest]], dataset: Dataset
) -> Iterator[Nest]:
    if not tf.executing_eagerly() or dataset.options().autotune.enabled is not None:
        return original(dataset)
    optimization = dataset.options().experimental_optimization
    if (
        optimization.inject_prefetch is not False
        and tf_internals.kind_of(dataset) != "Prefetch"
    ):
        # As with autotuning. It also completes a cache, since Keras does not ask for
        # more batches than there are.
        dataset = dataset.prefetch(_AHEAD)
    options = tf.data.Options()
    options.autotune.enabled = False
    return original(dataset.with_options(options))
