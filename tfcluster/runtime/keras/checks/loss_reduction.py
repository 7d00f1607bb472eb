"""Finds custom losses that are not a mean over the rows of a batch.

A number for a batch does not show how it was computed. So in a few steps the loss is
also computed for two parts of the batch. If it is a mean over the rows, it is the
weighted mean of the parts' losses; a sum is refused, and anything else gets a warning.
A function that returns a number for each row has to return the same numbers for the
rows of a part.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfcluster.runtime.collective.transports.base import Array
from tfcluster.runtime.keras import patches
from tfcluster.runtime.keras.batches.batch_slicing import has_dense_rows, rows_in
from tfcluster.runtime.keras.checks.check_steps import RareSteps
from tfcluster.runtime.keras.checks.rounding import TOLERANCES
from tfcluster.runtime.keras.session import Session
from tfcluster.runtime.tensor_types import Tensor


class LossReductionCheck:
    """The hook on ``Loss.__call__``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._local = threading.local()
        self._steps = RareSteps()

    def install(self) -> None:
        patches.TABLE.install({patches.LOSS_CALL: self._call})

    def returned(self, values: Any) -> None:
        """Record what the loss being called has returned, before its reduction."""
        self._local.values = values

    def _call(
        self,
        original: Callable[..., Any],
        loss: Any,
        y_true: Any,
        y_pred: Any,
        sample_weight: Any = None,
    ) -> Any:
        self._local.values = None
        result = original(loss, y_true, y_pred, sample_weight)
        values, share = self._local.values, self._session.share
        if values is None or share is None or share.alone:
            return result
        values = tf.convert_to_tensor(values)
        if values.shape.rank != 0 and _is_by_row(loss):
            return result
        if all(map(has_dense_rows, keras.tree.flatten([y_true, y_pred]))):
            self._look(loss, y_true, y_pred, values, share.undivided)
        return result

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _look(
        self, loss: Any, y_true: Any, y_pred: Any, values: Any, undivided: Any
    ) -> None:
        rows = tf.cast(rows_in(keras.tree.flatten(y_pred)[0]), tf.int64)
        tolerance = TOLERANCES.get(loss.dtype, max(TOLERANCES.values()))

        def part(start: Any, stop: Any) -> Any:
            def cut(tensor: Tensor) -> Any:
                return tf.cast(tf.convert_to_tensor(tensor)[start:stop], loss.dtype)

            true = keras.tree.map_structure(cut, y_true)
            pred = keras.tree.map_structure(cut, y_pred)
            return tf.cast(tf.stop_gradient(loss.call(true, pred)), tf.float64)

        def judge(whole: Any, first: Any, second: Any, rows: int) -> Any:
            if whole.ndim:
                parts = np.concatenate([first, second])
                kind = "mean" if same_rows(whole, parts, tolerance) else "whole batch"
            else:
                halves = float(first), float(second)
                kind = kind_of_loss(float(whole), halves, int(rows), tolerance)
            return np.bool_(self._judge(loss.name, kind))

        def look() -> Any:
            half = rows // 2
            parts = [part(0, half), part(half, rows)]
            whole = tf.cast(tf.stop_gradient(values), tf.float64)
            over = tf.numpy_function(judge, [whole, *parts, rows], tf.bool)
            return self._steps.end_if(loss, tf.reshape(over, []))

        due = self._steps.due(loss) & tf.logical_not(undivided)
        tf.cond(due & (rows >= 2), lambda: tf.group(look()), lambda: tf.no_op())

    def _judge(self, name: str, kind: str) -> bool:
        """Report the kind of a loss; return whether the check is over.

        Raises CollectiveError for a sum.
        """
        if kind == "sum":
            self._session.refuse(
                f"the loss {name} returns the sum over the rows of a batch: a function "
                "must return their mean, or one number for each row (a keras.Loss may "
                "have reduction='sum')"
            )
        if kind == "whole batch":
            self._session.warn(
                f"the loss {name} is not a mean over the rows of a batch: each rank "
                "computes it from its own rows, so the result differs from that of one "
                "machine"
            )
        return kind == "whole batch"


def kind_of_loss(
    whole: float, halves: tuple[float, float], rows: int, tolerance: float
) -> str:
    """The kind of a loss, from its values for a batch and for the batch's halves.

    The first half has ``rows // 2`` rows. Returns 'mean', 'sum', 'whole batch' or
    'unknown'.
    """
    first, second = halves
    size = max(map(abs, (whole, *halves)))
    if rows < 2 or not 0.0 < size < float("inf"):
        return "unknown"
    half = rows // 2
    mean = (half * first + (rows - half) * second) / rows
    if abs(whole - mean) <= tolerance * size:
        return "mean"
    if abs(whole - (first + second)) <= tolerance * size:
        return "sum"
    return "whole batch"


def same_rows(whole: Array, parts: Array, tolerance: float) -> bool:
    """Whether the rows' values computed in two parts equal those of the whole batch."""
    if whole.shape != parts.shape:
        return False
    with np.errstate(all="ignore"):
        apart = np.abs(whole - parts)
        size = np.maximum(np.abs(whole), np.abs(parts)).max(initial=0.0)
    return bool(not np.isfinite(size)) or bool((apart <= tolerance * size).all())


def _is_by_row(loss: Any) -> bool:
    """Whether it is a Keras loss in which a row's value depends on that row only."""
    pairs = getattr(keras.losses, "Circle", None)
    if pairs is not None and isinstance(loss, pairs):
        return False
    function = getattr(loss, "fn", None) or type(loss).call
    return str(function.__module__).split(".")[0] == str(keras.__name__)
