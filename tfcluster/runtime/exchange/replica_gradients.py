"""Combine what several devices of this process have computed, within the process.

For programs that keep one replica of a model on each device; between processes there is
``collective``. Gradients are tensors or IndexedSlices. Knows nothing of ranks.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

Pair = tuple[Any, Any]
"""A gradient and its variable, as optimizers take them."""

_nccl_calls = itertools.count()


def is_sparse(value: Any) -> bool:
    """Whether a gradient is IndexedSlices."""
    return isinstance(value, tf.IndexedSlices)


def total(values: Sequence[Any]) -> Any:
    """The sum of tensors of one shape; IndexedSlices one after the other.

    Where both come together the slices become tensors. Raises ValueError for none.
    """
    if not values:
        raise ValueError("there is nothing to add up")
    if not all(map(is_sparse, values)):
        return tf.add_n([tf.convert_to_tensor(value) for value in values])
    if len(values) == 1:
        return values[0]
    return tf.IndexedSlices(
        tf.concat([slices.values for slices in values], 0),
        tf.concat([tf.cast(slices.indices, tf.int64) for slices in values], 0),
        values[0].dense_shape,
    )


def divided(value: Any, count: int) -> Any:
    """A tensor, or the values of IndexedSlices, divided by ``count``."""
    if not is_sparse(value):
        return value / tf.cast(count, value.dtype)
    values = value.values / tf.cast(count, value.values.dtype)
    return tf.IndexedSlices(values, value.indices, value.dense_shape)


def copied(value: Any, device: str) -> Any:
    """The same on ``device``."""
    with tf.device(device):
        if not is_sparse(value):
            return tf.identity(value)
        shape = value.dense_shape
        return tf.IndexedSlices(
            tf.identity(value.values),
            tf.identity(value.indices),
            None if shape is None else tf.identity(shape),
        )


def aggregate_gradient(
    pairs: Sequence[Pair], *, mean: bool = False, check: bool = False
) -> tuple[Pair, Any]:
    """The replicas' gradients of one variable, added up; the first one's variable.

    The second is, if asked for by ``check``, a boolean tensor: whether any of the
    gradients has a NaN or an infinity; else None.
    """
    gradients = [gradient for gradient, _ in pairs]
    combined = total(gradients)
    if mean and len(gradients) > 1:
        combined = divided(combined, len(gradients))
    bad = None
    if check:
        parts = [g.values if is_sparse(g) else g for g in gradients]
        finite = [tf.reduce_all(tf.math.is_finite(part)) for part in parts]
        bad = tf.logical_not(tf.reduce_all(tf.stack(finite)))
    return (combined, pairs[0][1]), bad


def aggregate_hierarchically(
    devices: Sequence[str], replicas: Sequence[Sequence[Pair]]
) -> list[list[Pair]]:
    """The sum of every gradient, on each replica's device, by way of two groups.

    ``replicas[r]`` are replica r's gradients and variables, on ``devices[r]``. One
    device of each half of them adds up its half's, one of the two both, and each gives
    the sum to its half: so few copies go from one half to the other, which on many
    machines is the slow way. The work goes around the devices. Raises ValueError where
    numbers don't match.
    """
    if len(devices) != len(replicas) or not devices:
        raise ValueError(f"{len(replicas)} replicas on {len(devices)} devices")
    if len(devices) == 1:
        return [list(replicas[0])]
    half = len(devices) // 2
    halves = range(half), range(half, len(devices))
    columns = [
        _by_halves(devices, halves, number, pairs)
        for number, pairs in enumerate(zip(*replicas, strict=True))
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def _by_halves(
    devices: Sequence[str],
    halves: tuple[range, range],
    number: int,
    pairs: Sequence[Pair],
) -> list[Pair]:
    main = number % len(devices)
    own, other = halves if main in halves[0] else reversed(halves)
    other_main = other[number % len(other)]
    sums = []
    for members, place in ((own, main), (other, other_main)):
        with tf.device(devices[place]):
            sums.append(total([pairs[member][0] for member in members]))
    with tf.device(devices[main]):
        whole = total(sums)
    roots = {main: copied(whole, devices[main])}
    roots[other_main] = copied(whole, devices[other_main])
    return [
        (
            copied(roots[main if member in own else other_main], devices[member]),
            variable,
        )
        for member, (_, variable) in enumerate(pairs)
    ]


def aggregate_by_nccl(
    devices: Sequence[str], replicas: Sequence[Sequence[Pair]]
) -> list[list[Pair]]:
    """The sum of every gradient, on each replica's device, by NCCL between GPUs.

    Gradients are dense. Where a device is no GPU it is as ``aggregate_hierarchically``.
    """
    if len(devices) < 2 or not all("GPU" in device.upper() for device in devices):
        return aggregate_hierarchically(devices, replicas)
    return [
        list(row)
        for row in zip(
            *(_summed_by_nccl(devices, pairs) for pairs in zip(*replicas, strict=True)),
            strict=True,
        )
    ]


def _summed_by_nccl(devices: Sequence[str], pairs: Sequence[Pair]) -> list[Pair]:
    name = f"tfcluster-{os.getpid()}-{next(_nccl_calls)}"

    # One after the other, eagerly, each op would wait for the next one for ever.
    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def together(*gradients: Any) -> list[Any]:
        sums = []
        for device, gradient in zip(devices, gradients, strict=True):
            with tf.device(device):
                sums.append(
                    tf.raw_ops.NcclAllReduce(
                        input=gradient,
                        reduction="sum",
                        num_devices=len(devices),
                        shared_name=name,
                    )
                )
        return sums

    sums = together(*(gradient for gradient, _ in pairs))
    return [(value, variable) for value, (_, variable) in zip(sums, pairs, strict=True)]
