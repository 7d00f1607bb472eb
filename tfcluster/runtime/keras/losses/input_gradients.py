"""Scales gradients with respect to the rows of a batch to the loss of the whole batch.

A rank's loss is the mean over its own rows. Gradients of weights are averaged over the
ranks, so they become the gradients of the batch. But the gradient of a row stays on its
rank. A row has a larger share in a mean over few rows than in the mean over the batch,
so its gradient is too large, by the factor by which the batch has more rows. Therefore
it is scaled. The program may also differentiate a sum over the rows, or one number for
each row: these gradients are the same as on one machine. If it is unknown which of
these a number is, there is a warning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfcluster.runtime import tf_patches
from tfcluster.runtime.keras.losses.loss_rescaling import LossRescaling
from tfcluster.runtime.keras.losses.row_reduction import Reduction, Reductions
from tfcluster.runtime.keras.program_lines import user_line
from tfcluster.runtime.keras.session import BY_ROWS, Session
from tfcluster.runtime.keras.types import Tape
from tfcluster.runtime.tensor_types import Leaf, Nest, Tensor
from tfcluster.runtime.tensors import is_sparse


class InputGradients:
    """The hooks on gradients with respect to tensors that have rows."""

    def __init__(self, session: Session, rescaling: LossRescaling) -> None:
        self._session = session
        self._rescaling = rescaling

    def install(self) -> None:
        """Install the hooks in TensorFlow, once per process."""
        tf_patches.TABLE.install(
            {
                tf_patches.TAPE_GRADIENT: self._of_tape,
                tf_patches.GRADIENTS: self._of_graph,
                tf_patches.GRADIENTS_1: self._of_graph,
            }
        )

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _of_tape(
        self,
        original: Callable[..., Nest],
        tape: Tape,
        target: Nest,
        sources: Nest,
        *args: Any,
        **kwargs: Any,
    ) -> Nest:
        result = original(tape, target, sources, *args, **kwargs)
        return self._scaled(target, sources, result)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _of_graph(
        self,
        original: Callable[..., Nest],
        ys: Nest,
        xs: Nest,
        *args: Any,
        **kwargs: Any,
    ) -> Nest:
        """Call ``tf.gradients``; the parameters keep its names, for keywords."""
        return self._scaled(ys, xs, original(ys, xs, *args, **kwargs))

    def _scaled(self, target: Nest, sources: Nest, result: Nest) -> Nest:
        session = self._session
        share = session.share
        if (
            session.plain_step
            or session.within("apply")
            or session.within(BY_ROWS)
            or not session.divides
            or (share is not None and share.alone)
            or (share is None and session.inside_keras)
        ):
            return result
        found = tf.nest.flatten(result)
        pairs = zip(tf.nest.flatten(sources), found, strict=True)
        places = [
            place
            for place, (source, gradient) in enumerate(pairs)
            if gradient is not None and self._has_rows(source)
        ]
        if not places or (share is None and not self._may_be_divided()):
            return result
        kind = self._kind(tf.nest.flatten(target))
        if kind is Reduction.UNKNOWN:
            self._warn()
        if kind is not Reduction.MEAN:
            return result
        factor = self._rescaling.fraction_of_batch()
        if factor is None:
            return result
        for place in places:
            gradient = found[place]
            if not is_sparse(gradient):
                found[place] = gradient * tf.cast(factor, gradient.dtype)
        return tf.nest.pack_sequence_as(result, found)

    def _may_be_divided(self) -> bool:
        """Whether a loop's batch is divided, or a graph is created for any batch."""
        return not tf.executing_eagerly() or self._session.loop.divided

    def _kind(self, targets: list[Tensor]) -> Reduction:
        reductions = Reductions(self._is_of_rows, self._rescaling.is_mean)
        kinds = {reductions.of(each) for each in targets} - {Reduction.NOTHING}
        return kinds.pop() if len(kinds) == 1 else Reduction.UNKNOWN

    def _has_rows(self, source: Leaf) -> bool:
        return (
            isinstance(source, tf.Tensor)
            and source.dtype.is_floating
            and self._is_of_rows(source)
        )

    def _is_of_rows(self, tensor: Tensor) -> bool:
        """Whether the first axis of a tensor may be the axis of the rows."""
        shape = tensor.shape
        if shape.rank is None or shape.rank == 0:
            return False
        if shape[0] is None:
            return True
        present = self._rows()
        return present is None or (present > 0 and shape[0] % present == 0)

    def _rows(self) -> int | None:
        """This rank's number of rows; None if it is not known yet."""
        share = self._session.share
        if share is None:
            return int(self._session.loop.share.present)
        value = tf.get_static_value(tf.convert_to_tensor(share.present))
        return None if value is None else int(value)

    def _warn(self) -> None:
        session = self._session
        if session.size == 1 or (session.share is None and not session.loop.divided):
            return
        session.warn(
            f"{user_line()}: this gradient with respect to the rows of a batch may be "
            "larger than on one machine. Each rank computes it from its own rows only, "
            "and the gradient of a mean over fewer rows is larger for each row. "
            "tfcluster corrects it for Keras's losses and, in a tf.function, for "
            "tf.reduce_mean; it does not know what is differentiated here. If only the "
            "sign or the direction of the gradient is used, the result is right"
        )
