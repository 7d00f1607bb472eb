"""Each rank shuffles the data in its own order, instead of dividing a common order.

The rank is added to TensorFlow's global seed, on which shuffles by ``tf.data`` and of
Keras's arrays depend. All ranks keep the same Python and NumPy seeds: scripts use them,
for example, to hold out validation data, which must be the same everywhere. Initial
weights must also be the same, but these are broadcast anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime import tf_patches

STRIDE = 7_368_787
"""A prime, so that the seeds of different ranks rarely coincide."""

_SEEDS = 1 << 31


def install(rank: int) -> None:
    """Put the hook in place; a seed that is already set gets this rank's offset."""
    handler = partial(_set_seed, rank)
    tf_patches.TABLE.install({tf_patches.SET_SEED: handler})
    seed = tf.compat.v1.get_seed(0)[0]
    if seed is not None:
        tf.random.set_seed(seed)


def _set_seed(
    rank: int,
    original: Callable[[object], None],
    seed: int | np.integer[Any] | None,
) -> None:
    if isinstance(seed, int):
        seed = (seed + rank * STRIDE) % _SEEDS
    original(seed)
