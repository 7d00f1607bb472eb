"""A worker's towers: one copy of the model per device, and the mean over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from tfcluster.runtime.errors import CollectiveMismatchError
from tfcluster.runtime.tensor_types import Gradient, Tensor, Variable
from tfcluster.runtime.tensors import is_sparse

tf1 = tf.compat.v1

Gradients: TypeAlias = list[tuple[Gradient, Variable]]
"""Pairs of a gradient and its variable."""


def device_of(worker: str, tower: str) -> str:
    """``/job:worker/task:1/device:GPU:0`` for ``gpu:0``; else raises ValueError."""
    kind, _, number = tower.strip("/").removeprefix("device:").partition(":")
    if kind.lower() not in ("cpu", "gpu") or not number.isdecimal():
        raise ValueError(f"a tower must be like 'cpu:0' or 'gpu:1'; found {tower!r}")
    return f"{worker}/device:{kind.upper()}:{number}"


def require_same(names: Sequence[Sequence[str]]) -> None:
    """Raise CollectiveMismatchError unless all towers have the same variables."""
    for tower, found in enumerate(names):
        if text := differences(names[0], found):
            raise CollectiveMismatchError(
                "the towers of this worker have different models; compared with tower "
                f"0, tower {tower} {text}"
            )


def differences(expected: Sequence[str], found: Sequence[str]) -> str:
    """The names that are missing from ``found`` and extra in it; empty if none."""
    missing = sorted(set(expected) - set(found))
    extra = sorted(set(found) - set(expected))
    parts = []
    if missing:
        parts.append(f"misses {', '.join(missing)}")
    if extra:
        parts.append(f"also has {', '.join(extra)}")
    return " and ".join(parts)


def mean_gradients(towers: Sequence[Gradients], device: str) -> list[Gradient]:
    """The mean of each variable's gradients over the towers; None if no tower has one.

    Raises CollectiveMismatchError if only some towers have a gradient.
    """
    with tf1.device(device):
        return [
            _mean([gradient for gradient, _ in pairs], str(pairs[0][1].name))
            for pairs in zip(*towers, strict=True)
        ]


def mean_loss(losses: Sequence[Tensor], device: str) -> Tensor:
    """The mean of the towers' losses, tensors of one shape, computed on ``device``."""
    with tf1.device(device):
        return tf1.add_n(list(losses)) / len(losses)


def _mean(gradients: Sequence[Gradient], name: str) -> Gradient:
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return None
    if len(present) < len(gradients):
        raise CollectiveMismatchError(
            f"variable {name} has a gradient in some of this worker's towers only"
        )
    if len(present) == 1:
        return present[0]
    sparse = [gradient for gradient in present if is_sparse(gradient)]
    if len(sparse) == len(present):
        return tf.IndexedSlices(
            tf1.concat([gradient.values for gradient in sparse], 0) / len(sparse),
            tf1.concat([gradient.indices for gradient in sparse], 0),
            sparse[0].dense_shape,
        )
    return tf1.add_n([tf1.convert_to_tensor(g) for g in present]) / len(present)
