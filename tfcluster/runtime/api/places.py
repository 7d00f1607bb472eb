"""Who this rank is, as tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfcluster.runtime import world


def size_op(name: str | None = None) -> Any:
    """``size()`` as a scalar int32 tensor."""
    return tf.constant(world.size(), tf.int32, name=name)


def rank_op(name: str | None = None) -> Any:
    """``rank()`` as a scalar int32 tensor."""
    return tf.constant(world.rank(), tf.int32, name=name)


def local_size_op(name: str | None = None) -> Any:
    """``local_size()`` as a scalar int32 tensor."""
    return tf.constant(world.local_size(), tf.int32, name=name)


def local_rank_op(name: str | None = None) -> Any:
    """``local_rank()`` as a scalar int32 tensor."""
    return tf.constant(world.local_rank(), tf.int32, name=name)
