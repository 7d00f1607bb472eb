"""``BatchNormalization`` normalises over the rows of all ranks, as on one machine.

Without this hook, each rank would normalise over its own rows. With the option
``batch_normalization: local`` it does so, except in layers with ``synchronized=True``.
For those layers Keras asks ``tf.distribute``, which sees only one replica. Like
PyTorch's ``SyncBatchNorm``, the hook exchanges statistics in the forward pass and their
gradients in the backward pass, with one exchange for each layer and pass. The exchanges
are ops of the graph if the gradients are exchanged by such ops.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from tfcluster.runtime.collective import ReduceOp, Signature
from tfcluster.runtime.collective.collectives import reduce_arrays
from tfcluster.runtime.keras import internals, patches
from tfcluster.runtime.keras.checks.op_replay import Holds
from tfcluster.runtime.keras.data.dataset_iteration import DatasetIteration
from tfcluster.runtime.keras.graph_order import exchange_in_order
from tfcluster.runtime.keras.session import BY_ROWS, Session, Share
from tfcluster.runtime.keras.train.batch_norm_cost import BatchNormCost
from tfcluster.runtime.keras.types import BatchNormalization
from tfcluster.runtime.tensor_types import Array, Tensor

_Moments = Callable[[BatchNormalization, Tensor, Tensor | None], tuple[Tensor, Tensor]]


class SyncBatchNorm:
    """The hook on the moments of ``BatchNormalization``.

    Mean and variance have shape (channels,) and the dtype of the inputs; sums are
    float64. Follows PyTorch's ``SyncBatchNorm`` (torch/nn/modules/_functions.py), but
    exchanges sums and sums of squares in float64. The layer's call raises what
    ``exchange_in_order`` and ``Group.exchange`` raise.
    """

    def __init__(self, session: Session, holds: Holds, loops: DatasetIteration) -> None:
        self._session = session
        self._holds = holds
        self._loops = loops
        self._cost = BatchNormCost(session.step_rate, self._say)

    def _say(self, text: str) -> None:
        if self._session.chief:
            self._session.note(text)

    def install(self) -> None:
        """Install the hook in Keras, once per process."""
        patches.TABLE.install({patches.NORMALIZATION_MOMENTS: self._moments})

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _moments(
        self,
        original: _Moments,
        layer: BatchNormalization,
        inputs: Tensor,
        mask: Tensor | None,
    ) -> tuple[Tensor, ...]:
        moments = self._of_the_ranks(original, layer, inputs, mask)
        # It is documented that each rank normalises over its own rows, so loss checks
        # ignore it.
        return tuple(map(self._holds.hold, moments))

    def _of_the_ranks(
        self,
        original: _Moments,
        layer: BatchNormalization,
        inputs: Tensor,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        if layer.synchronized and self._session.shards and not self._is_alone():
            self._session.refuse(
                f"the layer {layer.name} has synchronized=True. With runtime.shards, "
                "BatchNormalization normalises over the rows of a shard"
            )
        if self._is_alone() or not self._spans_ranks(layer):
            return original(layer, inputs, mask)
        share = self._session.share or self._loops.trained.read()
        axes = internals.reduction_axes(layer)
        each = tf.cast(tf.shape(inputs)[0], inputs.dtype)
        weights, epsilon = tf.ones_like(inputs), tf.constant(0.0, tf.float64)
        if mask is not None:
            # Keras adds it to the number of unmasked entries.
            epsilon = keras.config.epsilon() / self._rows_of_all(share, each)
            weights = tf.cast(tf.expand_dims(mask, -1), inputs.dtype)
            weights = tf.broadcast_to(weights, tf.shape(inputs))
            inputs = tf.where(weights > 0, inputs, tf.zeros_like(inputs))

        # These are means over rows of the sums within a row, since a mask may hide more
        # of some rows.
        def per_row(values: Tensor) -> Tensor:
            total = tf.reduce_sum(values, axes, keepdims=True)
            return tf.reshape(total / each, [-1])

        count = per_row(weights)
        total = per_row(weights * inputs)
        centre = tf.math.divide_no_nan(total, count)
        shape = [1 if axis in axes else -1 for axis in range(inputs.ndim)]
        spread = per_row(weights * (inputs - tf.reshape(centre, shape)) ** 2)
        # In float64, so that the mean's square can be added here and subtracted later.
        packed = tf.cast(tf.stack([count, total, spread]), tf.float64)
        count, total, spread = tf.unstack(packed)
        squares = spread + total * tf.math.divide_no_nan(total, count)
        rows = tf.cast(share.rows, tf.float64)
        means = self._averaged(tf.stack([count, total, squares]), rows, layer.name)
        count, total, squares = tf.unstack(means)
        mean = total / (count + epsilon)
        variance = (squares - mean * (2 * total - mean * count)) / (count + epsilon)
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)

    def _spans_ranks(self, layer: BatchNormalization) -> bool:
        """Whether the layer normalises over the rows of the whole batch."""
        return layer.synchronized or self._session.normalizes_whole_batches

    def _is_alone(self) -> bool:
        """Whether the other ranks may not be calling the layer at the same time."""
        session = self._session
        if session.within(BY_ROWS):
            return True
        return session.inside_keras if session.share is None else session.share.alone

    def _rows_of_all(self, share: Share, own: Tensor) -> Tensor:
        """The number of rows of the whole batch: a scalar of dtype float64."""
        own = tf.cast(own, tf.float64)
        if share.total is None or not self._session.divides:
            return own * self._session.size
        # A rank without rows computes one row, which does not count.
        present = tf.maximum(tf.cast(share.present, tf.float64), 1.0)
        whole: Tensor = own * tf.cast(share.total, tf.float64) / present
        return tf.where(share.undivided, own, whole)

    def _averaged(self, local: Tensor, rows: Tensor, name: str) -> Tensor:
        """Average the ranks' tensors by rows, with the gradient of all ranks' losses.

        The total loss is the average of the ranks' losses by rows. So a rank whose own
        loss has the gradient ``g`` adds its fraction of ``g`` to the gradient on every
        rank.
        """

        session = self._session
        in_loop = session.share is None and session.divides

        def total(tensor: Tensor, what: str) -> Tensor:
            def run(array: Array) -> Array:
                if in_loop and not session.loop.is_dividing:
                    return array  # Every rank has the whole batch.
                signature = Signature(f"{what} of {name}")
                with self._cost.exchanging(name):
                    (summed,) = reduce_arrays(
                        session.group, [array], ReduceOp.SUM, signature
                    )
                return summed

            summed: Tensor = exchange_in_order(run, [tensor], tensor.dtype)
            summed.set_shape(tensor.shape)
            return summed

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def averaged(local: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
            # A rank without rows computes one row, which must not count; its values may
            # be NaN.
            part = tf.where(rows > 0, local * rows, tf.zeros_like(local))
            packed = tf.concat([tf.reshape(part, [-1]), [rows]], 0)
            sums = total(packed, "moments")
            whole = sums[-1]

            def gradient(upstream: Tensor) -> Tensor:
                part = tf.where(rows > 0, upstream, tf.zeros_like(upstream))
                return total(part * (rows / whole), "gradient of moments")

            return tf.reshape(sums[:-1] / whole, tf.shape(local)), gradient

        mean: Tensor = averaged(local)
        return mean
