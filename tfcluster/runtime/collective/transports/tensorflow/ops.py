"""TensorFlow's collective ops, for a group with one device of each rank.

They work eagerly and in graphs. Every rank has to make the same calls with the same
keys. With RING their order does not matter; NCCL needs the same order on all ranks. (In
a tf.function they run in the order in which they were written.)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfcluster.runtime.collective.buckets import DEFAULT_BYTES, Item, by_size
from tfcluster.runtime.collective.transports.base import ReduceOp
from tfcluster.runtime.collective.transports.tensorflow.collective_keys import (
    instance_keys,
)

RING = "RING"
NCCL = "NCCL"

MERGE_OPS = {
    ReduceOp.SUM: "Add",
    ReduceOp.MIN: "Min",
    ReduceOp.MAX: "Max",
    ReduceOp.PRODUCT: "Mul",
}

_DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64)

_SUBDIVISIONS = 4
"""A ring sends parts of a vector that is long enough in so many pieces at a time."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The group of devices, as one of its members sees it."""

    key: int
    """The group's, from ``keys.CollectiveKeys``."""
    size: int
    own: str
    """This rank's device, in full."""
    hint: str = RING
    """How: around a ring of gRPC connections, or by NCCL between GPUs."""


def all_reduce(
    tensor: Any,
    devices: Devices,
    key: int,
    op: ReduceOp,
    *,
    timeout_s: float = 0.0,
    after: Any = None,
) -> Any:
    """All-reduce ``tensor`` over the group; its shape and dtype are equal on all ranks.

    In a graph, the op runs after the tensor ``after``. Raises TypeError for dtypes
    other than float32, float64, int32 and int64, tf.errors.DeadlineExceededError if a
    rank has not come within ``timeout_s``, and other OpErrors if a rank is gone. A
    ``timeout_s`` of 0 waits forever; with another one TensorFlow 2.21 may crash when it
    expires.
    """
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype not in _DTYPES:
        raise TypeError(
            f"TensorFlow's collective ops do not support {tensor.dtype.name}"
        )
    with tf.device(devices.own), _after(after):
        return tf.raw_ops.CollectiveReduceV2(
            input=tensor,
            group_size=devices.size,
            group_key=devices.key,
            instance_key=key,
            ordering_token=[],
            merge_op=MERGE_OPS[op],
            final_op="Id",
            communication_hint=devices.hint,
            timeout_seconds=timeout_s,
            max_subdivs_per_device=_SUBDIVISIONS,
        )


def batch_all_reduce(
    tensors: Sequence[Any],
    devices: Devices,
    name: str,
    op: ReduceOp,
    *,
    timeout_s: float,
    bucket_bytes: int = DEFAULT_BYTES,
) -> list[Any]:
    """All-reduce many tensors over the group, bucket by bucket: see ``buckets``.

    Shapes, dtypes and ``name`` have to be equal on all ranks, and a name may be used
    only once in a graph, because the keys are derived from them. With NCCL the buckets
    run one after the other. Raises what ``all_reduce`` raises.
    """
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    buckets = by_size([_item(tensor) for tensor in tensors], bucket_bytes)
    words = [f"{tensor.dtype.name} {tensor.shape}" for tensor in tensors]
    keys = instance_keys(["batch", name, op.value, *words], len(buckets))
    results: dict[int, Any] = {}
    last = None
    for key, bucket in zip(keys, buckets, strict=True):
        chosen = [tensors[position] for position in bucket]
        flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in chosen], 0)
        last = all_reduce(
            flat,
            devices,
            key,
            op,
            timeout_s=timeout_s,
            after=last if devices.hint == NCCL else None,
        )
        parts = tf.split(last, [tf.size(tensor) for tensor in chosen])
        for position, part in zip(bucket, parts, strict=True):
            results[position] = tf.reshape(part, tf.shape(tensors[position]))
    return [results[position] for position in range(len(tensors))]


def _item(tensor: Any) -> Item:
    count = tensor.shape.num_elements()
    nbytes = None if count is None else count * tensor.dtype.size
    return Item(tensor.dtype.name, nbytes)


def _after(tensor: Any) -> AbstractContextManager[Any]:
    return nullcontext() if tensor is None else tf.control_dependencies([tensor])


def all_gather(
    tensor: Any, devices: Devices, key: int, *, timeout_s: float = 0.0
) -> Any:
    """All-gather: the group's tensors, concatenated along the first axis.

    The order is that of TensorFlow (``task:10`` comes before ``task:2``), and equal on
    all ranks. Shapes have to be equal on all ranks; dtypes and errors are those of
    ``all_reduce``.
    """
    with tf.device(devices.own):
        return tf.raw_ops.CollectiveGatherV2(
            input=tensor,
            group_size=devices.size,
            group_key=devices.key,
            instance_key=key,
            ordering_token=[],
            communication_hint=devices.hint,
            timeout_seconds=timeout_s,
        )
