"""``SyncBatchNormalization`` for programs that distribute their training themselves."""

from __future__ import annotations

from typing import Any, cast

import keras
import tensorflow as tf

from tfcluster.runtime.exchange.reduce import Sum, allreduce
from tfcluster.runtime.keras import internals
from tfcluster.runtime.process_group import size
from tfcluster.runtime.tensor_types import Tensor


class SyncBatchNormalization(
    keras.layers.BatchNormalization  # type: ignore[misc]  # untyped
):
    """A ``BatchNormalization`` over the rows of all ranks, which have separate batches.

    Follows ``SyncBatchNormalization`` of horovod/tensorflow/sync_batch_norm.py: mean
    and variance, of shape (channels,) and the inputs' dtype, come from one exchange of
    the sums, the sums of squares and the number of entries. The arguments are as for
    Keras's layer. Loading a saved model requires this class. If tfcluster divides the
    batches, use ``BatchNormalization(synchronized=True)`` instead.

    Raises ValueError for ``fused=True`` and, when it is called on several ranks, for
    masks; its call raises what ``allreduce`` raises.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.pop("fused", None):
            raise ValueError("SyncBatchNormalization does not support fused=True")
        super().__init__(*args, **kwargs)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _moments(self, inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if size() == 1:
            return internals.moments(cast(Any, super()), inputs, mask)
        if mask is not None:
            raise ValueError("SyncBatchNormalization does not support masks")
        axes = internals.reduction_axes(self)
        count = tf.cast(tf.size(inputs) / inputs.shape[self.axis], inputs.dtype)
        sums = tf.stack(
            [
                tf.reduce_sum(inputs, axes),
                tf.reduce_sum(inputs * inputs, axes),
                tf.fill([inputs.shape[self.axis]], count),
            ]
        )
        total = allreduce(sums, op=Sum, name=f"moments of {self.name}")
        mean = total[0] / total[2]
        # Rounding errors could make the variance negative.
        variance = tf.maximum(total[1] / total[2] - mean * mean, 0.0)
        return mean, variance
