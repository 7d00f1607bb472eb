"""Rank and size as tensors."""

from __future__ import annotations

import tensorflow as tf

from tfcluster.runtime import process_group
from tfcluster.runtime.process_sets import process_set_of
from tfcluster.runtime.tensor_types import Tensor


def size_op(process_set_id: int | str = 0, name: str | None = None) -> Tensor:
    """``size()`` of a process set as an int32 scalar tensor.

    It is a constant: the value when the op is created. A string given as
    ``process_set_id`` is taken as the name. Raises ValueError if there is no such
    process set, and NoRankError in a ps or data task. Follows ``size_op`` of
    horovod/tensorflow/mpi_ops.py, as do the other functions here.
    """
    if isinstance(process_set_id, str):
        return size_op(0, process_set_id)
    return tf.constant(process_set_of(process_set_id).size(), tf.int32, name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Tensor:
    """1 if this process is in the process set, else 0, as an int32 scalar tensor.

    Raises ValueError if there is no such process set, NoRankError in a ps or data task.
    """
    included = process_set_of(process_set_id).included()
    return tf.constant(int(included), tf.int32, name=name)


def rank_op(name: str | None = None) -> Tensor:
    """``rank()`` as an int32 scalar tensor.

    Raises what ``rank`` raises.
    """
    return tf.constant(process_group.rank(), tf.int32, name=name)


def local_size_op(name: str | None = None) -> Tensor:
    """``local_size()`` as an int32 scalar tensor.

    Raises what ``local_size`` raises.
    """
    return tf.constant(process_group.local_size(), tf.int32, name=name)


def local_rank_op(name: str | None = None) -> Tensor:
    """``local_rank()`` as an int32 scalar tensor.

    Raises what ``local_rank`` raises.
    """
    return tf.constant(process_group.local_rank(), tf.int32, name=name)
