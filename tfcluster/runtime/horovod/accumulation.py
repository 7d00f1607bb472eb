"""Gradient accumulation: sums the gradients of several passes before one exchange."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfcluster.runtime.tensor_types import Gradient, Tensor, Variable


class Accumulation:
    """Sums the gradients of ``passes`` calls of ``add``, or averages them.

    This is ``backward_passes_per_step`` of Horovod
    (horovod/tensorflow/gradient_aggregation.py).
    """

    def __init__(self, passes: int, *, average: bool) -> None:
        self._passes = passes
        self._average = average
        self._sums: list[Variable | None] | None = None
        self._count: Variable | None = None

    def add(
        self,
        gradients: Sequence[Gradient],
        apply: Callable[[list[Gradient]], object],
    ) -> None:
        """Add one pass's gradients; on every ``passes``-th call, ``apply`` the sums.

        A None stays None. IndexedSlices become tensors. All shapes must be known.
        Raises ValueError if a variable has a gradient in some passes but not in others.
        """
        dense = [
            None if gradient is None else tf.convert_to_tensor(gradient)
            for gradient in gradients
        ]
        sums, count = self._prepared(dense)
        for total, gradient in zip(sums, dense, strict=True):
            if total is not None and gradient is not None:
                total.assign_add(gradient)
        count.assign_add(1)

        def finish() -> bool:
            factor = 1 / self._passes if self._average else 1
            apply(
                [
                    None if total is None else total * tf.constant(factor, total.dtype)
                    for total in sums
                ]
            )
            for total in sums:
                if total is not None:
                    total.assign(tf.zeros_like(total))
            count.assign(0)
            return True

        if tf.executing_eagerly():
            if int(count) >= self._passes:
                finish()
        else:
            full = tf.greater_equal(count.read_value(), self._passes)
            tf.cond(full, finish, lambda: False)

    def _prepared(
        self, dense: Sequence[Tensor | None]
    ) -> tuple[list[Variable | None], Variable]:
        """The sums and the number of passes; both are created in the first pass."""
        if self._sums is None or self._count is None:
            with tf.init_scope():
                self._sums = [
                    None
                    if gradient is None
                    else tf.Variable(
                        tf.zeros(gradient.shape, gradient.dtype), trainable=False
                    )
                    for gradient in dense
                ]
                self._count = tf.Variable(0, trainable=False, dtype=tf.int32)
        present = [total is not None for total in self._sums]
        if present != [gradient is not None for gradient in dense]:
            raise ValueError(
                "backward_passes_per_step: a variable has a gradient in some passes "
                "and none in others"
            )
        return self._sums, self._count
