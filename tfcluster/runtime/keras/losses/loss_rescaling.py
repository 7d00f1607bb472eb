"""Rescale losses that do not divide by the number of rows in the batch.

Gradients are averaged over the ranks by rows, which is correct for a mean over rows. A
loss that is a sum, or that divides by the sum of its weights or by the number of
unmasked entries, is scaled here so that this average equals the gradient of the whole
batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfcluster.runtime import contract, tf_patches
from tfcluster.runtime.collective import ReduceOp, Signature
from tfcluster.runtime.collective.collectives import reduce_arrays
from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.checks.op_replay import Holds
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.losses.whole_batch_losses import WholeBatchLosses
from tfcluster.runtime.keras.object_map import ObjectMap
from tfcluster.runtime.keras.session import Session, Share
from tfcluster.runtime.keras.step_rows import StepRows
from tfcluster.runtime.tensor_types import DTypeLike, Graph, Tensor, TensorLike

_BY_WEIGHTS = "mean_with_sample_weight"


class LossRescaling:
    """The hooks on the reduction of losses in Keras and TensorFlow."""

    def __init__(
        self, session: Session, losses: WholeBatchLosses, holds: Holds
    ) -> None:
        self._session = session
        self._holds = holds
        self._losses = losses
        self._eager = ObjectMap[bool]()
        """Losses that were computed eagerly."""

    def install(self) -> None:
        """Install the hooks in Keras and TensorFlow, once per process."""
        patches.TABLE.install({patches.REDUCE_WEIGHTED_VALUES: self._reduce})
        tf_patches.TABLE.install({tf_patches.COMPUTE_AVERAGE_LOSS: self._average})

    def _reduce(
        self,
        original: Callable[..., Tensor],
        values: TensorLike,
        sample_weight: TensorLike | None = None,
        mask: Tensor | None = None,
        reduction: str | None = "sum_over_batch_size",
        dtype: DTypeLike | None = None,
    ) -> Tensor:
        loss = original(values, sample_weight, mask, reduction, dtype)
        if loss.shape.rank != 0:
            return loss
        return self._noted(self._of_batch(loss, values, sample_weight, mask, reduction))

    def _of_batch(
        self,
        loss: Tensor,
        values: TensorLike,
        sample_weight: TensorLike | None,
        mask: Tensor | None,
        reduction: str | None,
    ) -> Tensor:
        """The loss scaled so that its mean over the ranks, by rows, is the batch's."""
        if self._losses.returned(values):
            return loss
        if tf.convert_to_tensor(values).shape.rank == 0:
            return loss
        if reduction == "sum":
            return self._scaled(loss, self._whole())
        if reduction == _BY_WEIGHTS and (mask is not None or sample_weight is not None):
            if sample_weight is not None:
                sample_weight = tf.convert_to_tensor(sample_weight, loss.dtype)
            weights = internals.apply_mask(sample_weight, mask, loss.dtype, reduction)
            return self._scaled(loss, self._by_divisor(weights))
        if mask is not None:
            return self._scaled(loss, self._by_divisor(mask))
        return loss

    def _average(
        self,
        original: Callable[..., Tensor],
        per_example_loss: TensorLike,
        sample_weight: TensorLike | None = None,
        global_batch_size: TensorLike | None = None,
    ) -> Tensor:
        loss = original(per_example_loss, sample_weight, global_batch_size)
        if global_batch_size is None:
            return loss
        return self._noted(self._scaled(loss, self._whole()))

    # --- for gradients with respect to rows -------------------------------------------

    def is_mean(self, tensor: Tensor) -> bool:
        """Whether a tensor is a loss that this class has handled: see ``_of_batch``."""
        if tf.is_symbolic_tensor(tensor):
            return str(tensor.name) in _noted_in(tensor.graph)
        return tensor in self._eager

    def fraction_of_batch(self) -> Tensor | None:
        """This rank's rows per row of the batch, float64; None if that is 1."""
        whole = self._whole()
        if whole is None:
            return None
        fraction: Tensor = tf.math.divide_no_nan(tf.ones([], tf.float64), whole)
        return fraction

    def _noted(self, loss: Tensor) -> Tensor:
        if tf.is_symbolic_tensor(loss):
            _noted_in(loss.graph).add(str(loss.name))
        else:
            self._eager[loss] = True
        return loss

    def _scaled(self, loss: Tensor, factor: Tensor | None) -> Tensor:
        if factor is None:
            return loss
        # The loss now has the divisor of all ranks, so checks need not examine it.
        scaled: Tensor = self._holds.hold(loss * tf.cast(factor, loss.dtype))
        return scaled

    def _whole(self) -> Tensor | None:
        """Rows of the whole batch per row of this rank; None if that is 1."""
        session, share = self._session, self._session.share
        if share is not None and share.total is not None:
            return tf.math.divide_no_nan(_float(share.total), _float(share.present))
        if not self._is_divided(share):
            return None
        if share is not None:
            one = tf.ones([], tf.float64)
            return self._exchanged(one) * float(session.size)

        def run() -> Any:
            loop = session.loop
            if not loop.divided or not loop.share.present:
                return np.float64(1.0)
            assert loop.share.total is not None
            return np.float64(loop.share.total / loop.share.present)

        return _called(run, [])

    def _by_divisor(self, weights: Tensor | None) -> Tensor | None:
        share = self._session.share
        if not self._is_divided(share):
            return None
        self._session.refuse_in_shard(
            "a loss divides by the number of its unmasked entries, or by the sum of "
            "its weights, and so needs those of"
        )
        divisor = tf.reduce_sum(tf.cast(tf.stop_gradient(weights), tf.float64))
        return self._exchanged(divisor)

    def _is_divided(self, share: Share | None) -> bool:
        """Whether other ranks have other parts of the batch and can take part."""
        if share is not None:
            return not share.alone
        return self._session.divides and not self._session.inside_keras

    def _exchanged(self, divisor: Tensor) -> Tensor:
        """The factor by which a rank scales its loss.

        The row-weighted mean then divides by the sum of all ranks' divisors.
        """
        session, in_step = self._session, StepRows(self._session)

        def run(divisor: np.float64, *counted: Array) -> Any:
            rows = in_step.of(counted)
            if in_step.in_loop:
                if not session.loop.divided:
                    return np.float64(1.0)
                rows = rows if session.loop.share.counts else 0.0
            local = np.array([divisor if rows else 0.0, rows])
            (total,) = reduce_arrays(
                session.group, [local], ReduceOp.SUM, Signature("divisor of a loss")
            )
            if not rows or not total[0]:
                return np.float64(0.0)
            return np.float64(divisor / rows * total[1] / total[0])

        return _called(run, [divisor, *in_step.inputs])


def _noted_in(graph: Graph) -> set[str]:
    """The names of a graph's losses."""
    found: set[str] = contract.attached(graph, "tfcluster_losses", set)
    return found


def _float(number: TensorLike) -> Tensor:
    cast: Tensor = tf.cast(number, tf.float64)
    return cast


def _called(run: Callable[..., np.float64], inputs: Sequence[Tensor]) -> Tensor:
    """Call ``run`` when the step runs, and return its number as a scalar tensor."""
    factor: Tensor = exchange_in_order(run, inputs, tf.float64)
    factor.set_shape([])
    return factor
