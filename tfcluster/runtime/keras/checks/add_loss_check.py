"""Finds losses from ``add_loss`` that are not a mean over the rows of a batch.

``add_loss`` gets a number, which does not show how it was computed. So in its first
step the model is called again, with this rank's rows and with each half of them. The
results are compared like the values of a loss function: see ``loss_reduction``. The
method is tfcluster's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras import internals
from tfcluster.runtime.keras.batches.batch_slicing import has_dense_rows, rows_in
from tfcluster.runtime.keras.checks.known_objects import KnownObjects
from tfcluster.runtime.keras.checks.loss_reduction import kind_of_loss
from tfcluster.runtime.keras.checks.trial_steps import has_own_step
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.keras.types import Model
from tfcluster.runtime.tensor_types import Leaf, Nest, Tensor

_TOLERANCE = 0.02
"""Relative; wide, as the model may have been called with dropout."""


class AddLossCheck:
    """Checks a model after one of its steps has been called."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._judged = KnownObjects()

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def look(self, model: Model, data: Nest, undivided: bool | Tensor) -> None:
        """Compare what layers add to the loss for a rank's rows and for their halves.

        ``data`` is this rank's part of the batch, as ``train_step`` gets it. Runs until
        everything is known. Does nothing for an ``undivided`` batch (a bool, or a
        boolean scalar). Exchanges nothing.

        Raises CollectiveError, when the step runs, if a layer adds a sum over the rows;
        warns about other values that are not a mean.
        """
        names = _adders(model)
        inputs = keras.utils.unpack_x_y_sample_weight(data)[0]
        leaves = keras.tree.flatten(inputs)
        if not names or not leaves or not all(map(has_dense_rows, leaves)):
            return
        rows = tf.cast(rows_in(leaves[0]), tf.int64)
        half = rows // 2
        known = self._judged.of(model)

        def judge(numbers: Array, rows: Array) -> np.bool_:
            return np.bool_(self._judge(names, numbers, int(rows)))

        def look() -> Tensor:
            parts = [(0, rows), (0, half), (half, rows)]
            numbers = [_added(model, inputs, names, *part) for part in parts]
            if any(part is None for part in numbers):
                return known.assign(True, read_value=False)
            seen = tf.numpy_function(judge, [tf.stack(numbers), rows], tf.bool)
            return known.assign(tf.reshape(seen, []), read_value=False)

        over = known | (rows < 2) | undivided
        tf.cond(over, lambda: tf.no_op(), lambda: tf.group(look()))

    def _judge(self, names: Sequence[str], numbers: Array, rows: int) -> bool:
        """Judge the numbers of a batch and of its halves; return whether all are known.

        ``numbers`` (float64) has three rows, for the batch and its halves, and a column
        for each of ``names``.
        Raises CollectiveError for a sum.
        """
        kinds = [
            kind_of_loss(whole, (first, second), rows, _TOLERANCE)
            for whole, first, second in zip(*numbers.tolist(), strict=True)
        ]
        for name, kind in zip(names, kinds, strict=True):
            if kind == "sum":
                self._session.refuse(
                    f"the layer {name} adds the sum over the rows of a batch to the "
                    "loss, or a number that grows with the number of rows: the "
                    "argument of add_loss must be their mean"
                )
            if kind == "whole batch":
                self._session.differs(
                    f"the value that the layer {name} adds to the loss is not a mean "
                    "over the rows of a batch: each rank computes it from its own "
                    "rows, so the result differs from that of one machine"
                )
        return "unknown" not in kinds


def _adders(model: Model) -> list[str]:
    """The layers that added to the loss, one entry per number, in Keras's order."""
    layers = [model, *internals.layers_of(model, include_self=False)]
    return [layer.name for layer in layers for _ in internals.own_losses(layer)]


def _added(
    model: Model,
    inputs: Nest,
    names: Sequence[str],
    start: int | Tensor,
    stop: int | Tensor,
) -> Tensor | None:
    """The numbers that layers add to the loss for some rows, without any side effect.

    Returns a float64 vector with one number for each of the step's ``names``: the sum
    if a layer adds several numbers, as in Keras's own step. Returns None if the number
    of names differs, or if the program's own step may reduce the numbers differently.
    """

    def slice_rows(leaf: Leaf) -> Tensor:
        return tf.convert_to_tensor(leaf)[start:stop]

    rows = keras.tree.map_structure(slice_rows, inputs)
    variables = model.trainable_variables, model.non_trainable_variables
    penalties = len(internals.regularization_losses(model))
    # Preferably not in training mode: random numbers would change the results.
    ways = [{"training": False}, {"training": True}]
    for training in ways if internals.has_training_argument(model) else [{}]:
        try:
            *_, losses = model.stateless_call(
                *variables, rows, return_losses=True, **training
            )
        except Exception:  # The step may call its model in some other way.
            return None
        added = losses[: len(losses) - penalties]
        if len(added) == len(names):
            if has_own_step(model) and not all(map(_is_single, added)):
                return None
            return tf.stack([tf.reduce_sum(tf.cast(n, tf.float64)) for n in added])
    return None


def _is_single(number: Tensor) -> bool:
    return bool(number.shape.num_elements() == 1)
