"""Iterators over ``tf.data`` that end at once: without TensorFlow's autotuning.

A thread of each iterator looks for better settings, at first after 10 ms and then after
twice as long each time, up to a minute. An iterator that is deleted wakes this thread
and waits for its end. But the thread may look before the word "cancelled" is written,
which is after it was woken (``CancellationManager::StartCancel``), and sleep on. So the
end of an epoch may take as long as the epoch took; on idle cores it mostly does, and
for one rank all of them wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfcluster.runtime.keras import patches


def install() -> None:
    """Switch autotuning off in every iterator whose script does not ask for it.

    ``AUTOTUNE`` then means as many calls at a time as TensorFlow has threads.
    """
    patches.TABLE.install({patches.DATASET_ITER: _iter})


def _iter(original: Callable[..., Any], dataset: Any) -> Any:
    if not tf.executing_eagerly() or dataset.options().autotune.enabled is not None:
        return original(dataset)
    options = tf.data.Options()
    options.autotune.enabled = False
    return original(dataset.with_options(options))
