"""Averages all workers' gradients on the parameter servers.

Each worker adds its gradients to conditional accumulators there; the chief takes the
means and applies them once, as in ``SyncReplicasOptimizer``.
"""

from __future__ import annotations

from typing import TypeAlias

import tensorflow as tf

from tfcluster.runtime.tensor_types import Gradient, Operation, Tensor, Variable
from tfcluster.runtime.tf1.barrier import Barriers
from tfcluster.runtime.tf1.cluster_members import Workers
from tfcluster.runtime.tf1.towers import Gradients
from tfcluster.runtime.tf1_types import V1Optimizer

tf1 = tf.compat.v1

_NEVER_STALE = tf.int64.max
"""Never drop a gradient as stale: the barriers ensure that none is late."""


Accumulator: TypeAlias = (
    "tf.compat.v1.ConditionalAccumulator | tf.compat.v1.SparseConditionalAccumulator"
)


def applied_mean(
    optimizer: V1Optimizer,
    pairs: Gradients,
    global_step: Variable,
    workers: Workers,
    barriers: Barriers,
) -> tuple[Operation, Tensor]:
    """The op that applies the workers' mean gradient, and whether any worker has left.

    On workers other than the chief, the op only contributes gradients. After a worker
    has left, the mean is the mean of the remaining workers' gradients.
    """
    pairs = [
        (gradient, variable) for gradient, variable in pairs if gradient is not None
    ]
    accumulators = [
        _accumulator(gradient, variable, barriers.scope) for gradient, variable in pairs
    ]
    pushed = barriers.after(
        "gradients_pushed",
        [
            _pushed(accumulator, gradient, variable)
            for accumulator, (gradient, variable) in zip(
                accumulators, pairs, strict=True
            )
        ],
    )
    # All workers build this op, so that all have the same optimizer variables; only the
    # chief runs it.
    with tf1.control_dependencies([pushed.op]):
        means = [
            _taken(accumulator, gradient, variable)
            for accumulator, (gradient, variable) in zip(
                accumulators, pairs, strict=True
            )
        ]
        applied = optimizer.apply_gradients(
            zip(means, [variable for _, variable in pairs], strict=True),
            global_step=global_step,
        )
    return (applied if workers.is_chief else pushed.op), pushed.left


def _accumulator(gradient: Gradient, variable: Variable, scope: str) -> Accumulator:
    kind = (
        tf1.SparseConditionalAccumulator
        if isinstance(gradient, tf.IndexedSlices)
        else tf1.ConditionalAccumulator
    )
    with tf1.device(variable.device):
        return kind(
            variable.dtype.base_dtype,
            shape=variable.shape,
            shared_name=f"{variable.op.name}/mean/{scope}",
        )


def _pushed(
    accumulator: Accumulator, gradient: Gradient, variable: Variable
) -> Operation:
    with tf1.device(variable.device):
        if isinstance(gradient, tf.IndexedSlices):
            add = accumulator.apply_indexed_slices_grad
        else:
            add = accumulator.apply_grad
        pushed: Operation = add(gradient, local_step=_NEVER_STALE)
        return pushed


def _taken(
    accumulator: Accumulator, gradient: Gradient, variable: Variable
) -> Gradient:
    """The mean of all gradients received so far; after the barrier, of all workers."""
    with tf1.device(variable.device):
        if isinstance(gradient, tf.IndexedSlices):
            return accumulator.take_indexed_slices_grad(1)
        return accumulator.take_grad(1)
