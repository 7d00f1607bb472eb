"""All-reduce gradients in a graph while the backward pass continues.

One op begins the exchange as soon as the step begins: the ranks compare what they are
about to do. Then one op for each bucket hands its gradients to the thread that
exchanges them, and does not wait. Then one op for each bucket waits for its means: the
first means are applied while the others are still being exchanged.

TensorFlow chooses the order in which it runs the ops of a graph, but ``graph_order``
keeps these ops in the order in which they are created, which is the order of the
buckets. So all ranks exchange the same buckets in the same order, even if one of them
traces again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective import Group
from tfcluster.runtime.collective.buckets import Bucket, Item
from tfcluster.runtime.collective.sparse import Slices
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.exchange.tensor_list import TensorList, flattened, received
from tfcluster.runtime.exchange.wire_format import WireTensor
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.train.allreduce_step import AllreduceStep
from tfcluster.runtime.tensor_types import Tensor

_MIN_BYTES = 1 << 20
"""Exchanging fewer bytes takes about as long as starting a thread."""


def pays(group: Group, tensors: TensorList, wire_tensors: Sequence[WireTensor]) -> bool:
    """Whether exchanging these tensors should overlap with computing them.

    Ranks need not agree: they exchange the same messages in any case.
    """
    if tf.executing_eagerly() or not group.several_hosts:
        return False
    items = [item_of(each.tensor) for each in wire_tensors[: tensors.dense_count]]
    if any(item.nbytes is None for item in items):
        return False
    return sum(item.nbytes or 0 for item in items) >= _MIN_BYTES


def item_of(tensor: Tensor) -> Item:
    """The properties of a tensor that bucketing needs."""
    count = tensor.shape.num_elements()
    dtype = tensor.dtype
    return Item(
        str(np.dtype(dtype.as_numpy_dtype)),
        None if count is None else count * dtype.size,
    )


def exchange(
    step: AllreduceStep, tensors: TensorList, wire_tensors: Sequence[WireTensor]
) -> TensorList:
    """The means of ``tensors``, computed by ops of the current graph.

    The result has the same kinds of tensors. ``wire_tensors`` are the result of
    ``step.wire_tensors``. Raises CollectiveError if XLA would compile the graph, and
    what ``step`` raises when the ops run.
    """
    items = [item_of(each.tensor) for each in wire_tensors[: tensors.dense_count]]

    def begin(*context: Array) -> np.generic:
        step.begin(items, context)
        return np.True_

    exchange_in_order(begin, step.context(), tf.bool)
    buckets = step.buckets(items)
    for bucket in buckets:
        gradients = [wire_tensors[place].tensor for place in bucket]
        exchange_in_order(_hand_over(step, bucket), gradients, tf.bool)
    results: dict[int, Tensor] = {}
    for bucket in buckets[:-1]:
        types = [wire_tensors[place].tensor.dtype for place in bucket]
        means = exchange_in_order(_receive(step, bucket), [], types)
        results.update(zip(bucket, means, strict=True))
    early, late = sum(map(len, buckets)), len(items)
    sent = [*(each.tensor for each in wire_tensors), *tensors.indices]
    remaining = [place for place in range(len(sent)) if place not in results]

    def finish(*arrays: Array) -> list[Array]:
        dense, rest = arrays[: late - early], arrays[late - early :]
        values, indices = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        slices = [Slices(*pair) for pair in zip(values, indices, strict=True)]
        found = flattened(*step.finish(dense, slices))
        return [found[place] for place in remaining]

    types = [sent[place].dtype for place in remaining]
    found = exchange_in_order(finish, sent[early:], types)
    results.update(zip(remaining, found, strict=True))
    return received(
        tensors, wire_tensors, [results[place] for place in range(len(sent))]
    )


def _hand_over(step: AllreduceStep, bucket: Bucket) -> Callable[..., np.generic]:
    def run(*arrays: Array) -> np.generic:
        step.hand_over(bucket, arrays)
        return np.True_

    return run


def _receive(step: AllreduceStep, bucket: Bucket) -> Callable[..., list[Array]]:
    def run() -> list[Array]:
        return list(step.receive(bucket))

    return run
