"""Disables ``tf.data`` autotuning, so that iterators end at once.

In each iterator a thread looks for better settings, first after 10 ms and then after
twice as long each time, up to a minute. Deleting an iterator wakes this thread and
waits for its end. But "cancelled" is only set after the wake-up
(``CancellationManager::StartCancel``): if the thread checks it before that, the thread
continues to sleep. So the end of an epoch may take as long as the epoch did. On idle
cores this usually happens, and all ranks wait for the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import tensorflow as tf

from tfcluster.runtime import tf_internals, tf_patches
from tfcluster.runtime.contract import HandlerPlace
from tfcluster.runtime.tensor_types import Dataset, Nest


def install() -> None:
    """Disable autotuning in every iterator unless the script asks for it.

    ``AUTOTUNE`` then means as many parallel calls as TensorFlow has threads.
    """
    tf_patches.TABLE.install({tf_patches.DATASET_ITER: _iter}, HandlerPlace.LAST)


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
        dataset = dataset.prefetch(tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.autotune.enabled = False
    return original(dataset.with_options(options))
