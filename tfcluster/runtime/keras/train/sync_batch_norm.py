"""``BatchNormalization(synchronized=True)`` normalises over the rows of all ranks.

Keras asks ``tf.distribute`` to do that, which knows of only one replica. Without this
hook each rank would normalise over its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfcluster.runtime.collective import ReduceOp, Signature
from tfcluster.runtime.collective.collectives import reduce_arrays
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.checks.op_replay import Holds
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.session import Session, Share
from tfcluster.runtime.keras.types import BatchNormalization
from tfcluster.runtime.tensor_types import Tensor


class SyncBatchNorm:
    """The hook on the moments of ``BatchNormalization``."""

    def __init__(self, session: Session, holds: Holds) -> None:
        self._session = session
        self._holds = holds

    def install(self) -> None:
        patches.TABLE.install({patches.NORMALIZATION_MOMENTS: self._moments})

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _moments(
        self,
        original: Callable[..., Any],
        layer: BatchNormalization,
        inputs: Any,
        mask: Any,
    ) -> Any:
        moments = self._of_the_ranks(original, layer, inputs, mask)
        # That each rank normalises over its own rows is documented; loss checks ignore
        # it.
        return tuple(map(self._holds.hold, moments))

    def _of_the_ranks(
        self,
        original: Callable[..., Any],
        layer: BatchNormalization,
        inputs: Any,
        mask: Any,
    ) -> Any:
        share = self._session.share
        if not layer.synchronized or share is None or share.alone:
            return original(layer, inputs, mask)
        axes = internals.reduction_axes(layer)
        rows = tf.cast(share.rows, inputs.dtype)
        each = tf.cast(tf.shape(inputs)[0], inputs.dtype)
        weights, epsilon = tf.ones_like(inputs), 0.0
        if mask is not None:
            # Keras adds it to the number of unmasked entries.
            epsilon = keras.config.epsilon() / self._rows_of_all(share, each)
            weights = tf.cast(tf.expand_dims(mask, -1), inputs.dtype)
            weights = tf.broadcast_to(weights, tf.shape(inputs))
        # Means over rows of sums within a row, since a mask may leave less of some
        # rows.

        def mean_of_sums(values: Any) -> Any:
            local = tf.reduce_sum(values * weights, axes, keepdims=True) / each
            return self._averaged(local, rows, layer.name)

        count = mean_of_sums(tf.ones_like(inputs)) + epsilon
        mean = mean_of_sums(inputs) / count
        variance = mean_of_sums((inputs - mean) ** 2) / count
        return tf.reshape(mean, [-1]), tf.reshape(variance, [-1])

    def _rows_of_all(self, share: Share, own: Any) -> Any:
        if share.total is None:
            return own * self._session.size
        return tf.cast(share.total, own.dtype)

    def _averaged(self, local: Any, rows: Any, name: str) -> Any:
        """Average the ranks' tensors by rows, with the gradient of all ranks' losses.

        The total loss is the average of the ranks' losses by rows. So a rank whose own
        loss has the gradient ``g`` adds its fraction of ``g`` to the gradient on every
        rank.
        """

        def total(tensor: Tensor, what: str) -> Any:
            def run(array: Any) -> Any:
                signature = Signature(f"{what} of {name}")
                return reduce_arrays(
                    self._session.group, [array], ReduceOp.SUM, signature
                )[0]

            summed = exchange_in_order(run, [tensor], tensor.dtype)
            summed.set_shape(tensor.shape)
            return summed

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def averaged(local: Any) -> tuple[Any, Callable[[Any], Any]]:
            # A rank without rows computes one that must not count; its values may be
            # NaN.
            part = tf.where(rows > 0, local * rows, tf.zeros_like(local))
            packed = tf.concat([tf.reshape(part, [-1]), [rows]], 0)
            sums = total(packed, "moments")
            whole = sums[-1]

            def gradient(upstream: Any) -> Any:
                part = tf.where(rows > 0, upstream, tf.zeros_like(upstream))
                return total(part * (rows / whole), "gradient of moments")

            return tf.reshape(sums[:-1] / whole, tf.shape(local)), gradient

        return averaged(local)
