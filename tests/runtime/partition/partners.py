"""Cases whose results also meet tensors that have not been divided before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from tests.runtime.partition.rule_checks import Case, Chance, check
from tfcluster.runtime.partition.placement import Placement, Shard

_MOST_DIMENSIONS = 8
"""TensorFlow chooses between tensors of no more."""


def check_with_partners(
    make: Callable[[Chance], Case], seed: int, others: int = 2
) -> None:
    """Like ``check``; the parts of each result must also be those of the placement.

    Parts that belong to other rows could still make the same whole.
    """
    check(lambda chance: with_partners(make(chance)), seed, others)


def with_partners(case: Case) -> Case:
    """The case, with each result that has a shape once more.

    It is then chosen element by element, from itself, by a constant of its shape. So
    each rank takes its rows of the constant.
    """

    def call(*inputs: Any) -> Any:
        found = tf.nest.flatten(case.call(*inputs))
        return [*found, *(_chosen(each) for each in found if each.shape.rank)]

    outputs: list[Placement] | None = None
    if case.outputs is not None:
        shards = [each for each in case.outputs if isinstance(each, Shard)]
        outputs = [*case.outputs, *shards]
        if len(shards) < len(case.outputs):
            outputs = None
    return replace(case, call=call, outputs=outputs)


def _chosen(tensor: Any) -> Any:
    if not tensor.shape.is_fully_defined() or tensor.dtype == tf.variant:
        return tensor
    if tensor.shape.rank > _MOST_DIMENSIONS:
        return tensor
    mask = np.arange(tensor.shape.num_elements()) % 3 == 0
    return tf.where(tf.constant(mask.reshape(tensor.shape)), tensor, tensor)
