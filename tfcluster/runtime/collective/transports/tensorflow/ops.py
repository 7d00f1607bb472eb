"""TensorFlow's collective ops, for a group with one device of each rank.

They work eagerly and in graphs. Every rank has to make the same calls with the same
keys. With RING their order does not matter; NCCL needs the same order on all ranks. (In
a tf.function they run in the order in which they were written.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfcluster.runtime.collective.transports.base import ReduceOp
from tfcluster.runtime.tensor_types import Tensor, TensorLike

RING = "ring"
NCCL = "nccl"
"""Communication hints. TensorFlow ignores hints in capitals, and uses a ring."""

MERGE_OPS = {
    ReduceOp.SUM: "Add",
    ReduceOp.MIN: "Min",
    ReduceOp.MAX: "Max",
    ReduceOp.PRODUCT: "Mul",
}

DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64)

SUBDIVISIONS = 4
"""Number of pieces of a long vector that a ring sends concurrently."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The group of devices, as one of its members sees it."""

    key: int
    """The group's key, one of ``collective_keys.GROUP_KEYS``."""
    size: int
    own: str
    """The full name of this rank's device."""
    hint: str = RING
    """The method: a ring of gRPC connections, or NCCL between GPUs."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of devices of the ranks, as one of them sees them."""

    large: Devices
    """For floating-point numbers: GPUs if every rank has its own, else CPUs."""
    cpus: Devices
    """For all other data."""


def all_reduce(
    tensor: TensorLike,
    devices: Devices,
    key: int,
    op: ReduceOp,
    *,
    timeout_s: float = 0.0,
    ordering_token: Sequence[Tensor] = (),
) -> Tensor:
    """All-reduce ``tensor`` over the group; its shape and dtype are equal on all ranks.

    The result has that shape and dtype. Raises TypeError for dtypes other than float32,
    float64, int32 and int64, tf.errors.DeadlineExceededError if a rank does not arrive
    within ``timeout_s`` seconds, and other OpErrors if a rank is gone. A ``timeout_s``
    of 0 waits forever; any other may crash TensorFlow 2.21 when it expires. In a
    tf.function, ops with the same ``ordering_token``, the handle of a variable, run in
    the order in which they were written.
    """
    given: Tensor = tf.convert_to_tensor(tensor)
    if given.dtype not in DTYPES:
        raise TypeError(
            f"TensorFlow's collective ops do not support {given.dtype.name}"
        )
    with tf.device(devices.own):
        return tf.raw_ops.CollectiveReduceV2(
            input=given,
            group_size=devices.size,
            group_key=devices.key,
            instance_key=key,
            ordering_token=list(ordering_token),
            merge_op=MERGE_OPS[op],
            final_op="Id",
            communication_hint=devices.hint,
            timeout_seconds=timeout_s,
            max_subdivs_per_device=SUBDIVISIONS,
        )


def all_gather(
    tensor: TensorLike,
    devices: Devices,
    key: int | Tensor,
    *,
    timeout_s: float = 0.0,
    ordering_token: Sequence[Tensor] = (),
) -> Tensor:
    """All-gather: the group's tensors, concatenated along the first axis.

    ``tensor`` has shape (rows, ...), equal on all ranks; the result has shape (ranks *
    rows, ...) and the same dtype. The order is TensorFlow's (``task:10`` comes before
    ``task:2``), and equal on all ranks. Dtypes, ``timeout_s`` (seconds),
    ``ordering_token`` and errors are as for ``all_reduce``; float16 is supported, too.
    """
    with tf.device(devices.own):
        return tf.raw_ops.CollectiveGatherV2(
            input=tensor,
            group_size=devices.size,
            group_key=devices.key,
            instance_key=key,
            ordering_token=list(ordering_token),
            communication_hint=devices.hint,
            timeout_seconds=timeout_s,
        )
